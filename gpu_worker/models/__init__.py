"""Models: the spec, the table of families, the one decoder and the one encoder, the loader that fills them, and
transformers' own models for what the table does not know."""
