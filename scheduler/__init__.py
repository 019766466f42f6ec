"""The scheduler: one process that owns every request's progress, the block tables, the prefix caches and the replicas.

It talks to gpu_workers on one ROUTER (plans out, results in) and to detokenizers and frontends on another (requests in,
tokens out). ``core.Scheduler`` and all it calls do no IO; ``loop.py`` is the only file that touches a socket. It must
never import torch, a tokenizer or another service, and never wait for anything but its sockets.
"""
