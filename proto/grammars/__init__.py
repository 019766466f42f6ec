"""Structured outputs as grammars: what the detokenizer checks and the worker matches."""
