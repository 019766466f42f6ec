"""Models: the spec, the table of families, the one decoder, and the loader that fills it."""
