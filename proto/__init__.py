"""What crosses a socket: messages, parameters, codec, sockets, and the flags every process shares.

Every service may import this package and nothing else of quire's; it imports nothing of ours. It must never
import torch, tokenizers or aiohttp, so that each process loads only what it uses.
"""
