"""The version of all that is installed together."""

__version__ = "0.1.0"
