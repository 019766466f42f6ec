"""The client side of a running quire: Engine (submit, stream, abort, resubmit), the offline LLM, and the launcher.

Engine owns the request itself: its prompt, its seed and every token received so far. ``core.py`` decides, by messages
alone; ``engine.py`` has the event loop and the sockets. It talks to detokenizers, and to the scheduler for Hello, Peers
and figures only. It must never import torch or a tokenizer library (LLM does where its user asks for the tokenizer),
and it must never assume that a process it talks to is still the one of a moment ago: leases and attempts say so.
"""
