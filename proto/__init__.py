"""What crosses a socket: messages, parameters, codec, sockets, and the flags every process shares; and what several
services read alike: a model's configs, its tokenizer's files, grammars.

Every service may import this package and nothing else of quire's; it imports nothing of ours. It must never import
torch or aiohttp, and only its modules for tokenizers import tokenizers, so that each process loads only what it uses.
"""
