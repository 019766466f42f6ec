"""The detokenizer process: the only one that encodes prompts and decodes outputs.

Owns: the tokenizer, the chat template, and for each open request the state of decoding and of stop strings.
Talks to: Engines, which connect to its ROUTER, and the scheduler's front socket, through one DEALER.
Must never: encode or render on its event loop, drop a request without a reply, import torch, or let one request's
error end the process. (transformers' slow tokenizers bring torch along, where it is installed.)
"""
