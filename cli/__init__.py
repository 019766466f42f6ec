"""The command line: ``quire serve | chat | complete | bench | workers | replay | keygen``.

Each command is a module with ``add_parser(subparsers)``, which adds its flags and sets ``run``, a function of the
parsed namespace that returns an exit code (None is 0). Only the module of the command asked for is imported, so that
``quire chat`` starts as fast as Python does. It must never hold the model or the queue: those are processes.
"""
