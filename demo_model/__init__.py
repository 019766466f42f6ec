"""The demo model: a normal Hugging Face folder, part of the package as data."""
