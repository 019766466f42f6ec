"""Speculation in the worker: who drafts tokens ahead of time (``proposer.py``), and the step that verifies them
(``runner.py``, ``verify.py``)."""
