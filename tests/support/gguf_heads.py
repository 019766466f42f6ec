"""Heads of GGUF files written value by value, so that any of them can be wrong; and heads changed at random."""

from __future__ import annotations

import random
import resource
import struct
import time
from pathlib import Path

from quire.proto.checkpoint.gguf import read_gguf
from quire.proto.checkpoint.gguf_config import Keys, held_tensors
from quire.proto.checkpoint.gguf_tokenizer import gguf_tokenizer
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.config import ConfigError

U32, I32, F32, BOOL, TEXT, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def texts(name: str, values: list[str]) -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", TEXT, len(values)) + b"".join(map(text, values)))


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, start: int = 0) -> bytes:
    """``shape`` as in the file: the rows' length first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


def head(
    keys: list[bytes], tensors: list[bytes], magic: bytes = b"GGUF", version: int = 3, says_keys: int | None = None,
    says_tensors: int | None = None,
) -> bytes:  # fmt: skip
    """``says_keys``, ``says_tensors``: the counts, where they are not those that are there."""
    made = [len(each) if said is None else said for each, said in ((tensors, says_tensors), (keys, says_keys))]
    return magic + struct.pack("<IQQ", version, *made) + b"".join(keys) + b"".join(tensors)


def sound(data: int = 448) -> bytes:
    """A whole small file."""
    keys = [
        key("general.architecture", TEXT, text("llama")), key("llama.block_count", U32, struct.pack("<I", 1)),
        key("llama.embedding_length", U32, struct.pack("<I", 8)), key("llama.feed_forward_length", U32, b"\x08\0\0\0"),
        key("llama.attention.head_count", U32, b"\2\0\0\0"), key("tokenizer.ggml.eos_token_id", U32, b"\3\0\0\0"),
        key("llama.rope.freq_base", F32, struct.pack("<f", 1e4)),
        key("tokenizer.ggml.token_type", ARRAY, struct.pack("<IQ4i", I32, 4, 1, 1, 1, 3)),
        key("tokenizer.chat_template", TEXT, text("{{ messages }}")), key("tokenizer.ggml.model", TEXT, text("gpt2")),
        texts("tokenizer.ggml.tokens", ["a", "b", "ab", "</s>"]), texts("tokenizer.ggml.merges", ["a b"]),
        key("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ4f", F32, 4, 0, 1, 2, 3)),
        key("tokenizer.ggml.add_bos_token", BOOL, b"\1"), key("llama.context_length", U64, struct.pack("<Q", 64)),
    ]  # fmt: skip
    tensors = [
        tensor("token_embd.weight", (8, 4)), tensor("output_norm.weight", (8,), 0, 128),
        tensor("rope_freqs.weight", (2,), 0, 160), tensor("blk.0.attn_q.weight", (8, 8), 0, 192),
    ]  # fmt: skip
    made = head(keys, tensors)
    return made + bytes(-len(made) % 32) + struct.pack("<f", 1.0) * (data // 4)


_NUMBERS = [0, 1, 2, 7, 255, 2**16, 2**20, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


def changed(rng: random.Random, whole: bytes) -> bytes:
    """``whole`` with one to four changes: bytes, numbers of 4 and 8 bytes, pieces doubled, dropped or moved, an end."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(max(1, len(data)))
        kind = rng.randrange(7)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            data[at : at + 4] = struct.pack("<I", rng.choice(_NUMBERS) & 0xFFFFFFFF)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", rng.choice(_NUMBERS))
        elif kind == 3:
            del data[at : at + rng.randint(1, 40)]
        elif kind == 4:
            data[at:at] = data[at : at + rng.randint(1, 80)]
        elif kind == 5:
            data[at:at] = rng.randbytes(rng.randint(1, 24))
        else:
            del data[at:]
    return bytes(data)


def read_whole(file: Path) -> int:
    """Read all of a file but its weights: its config, names, and tokenizer. How many of the three were refused by a
    ConfigError, which must be one line with the file's name; nothing else may be raised.
    """
    refused = 0
    for read in (lambda: load_model_config(str(file)), lambda: _names(file), lambda: gguf_tokenizer(file)):
        try:
            read()
        except ConfigError as error:
            refused += 1
            if str(file) not in str(error) or "\n" in str(error):
                raise AssertionError(f"not one line with the file's name: {error}") from error
    return refused


def _names(file: Path) -> None:
    found = read_gguf(file)
    for _ in held_tensors(found, Keys(found)):
        pass


def fuzz(count: int, seed: int, folder: Path) -> dict[str, float]:
    """Read ``count`` changed heads. Raises AssertionError where one takes long, or memory grows; else figures."""
    rng, whole, file = random.Random(seed), sound(), folder / "model.gguf"
    refused, longest = 0, 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        file.write_bytes(changed(rng, whole))
        began = time.process_time()
        refused += read_whole(file)
        longest = max(longest, time.process_time() - began)
        if longest > 5.0:  # all of these take milliseconds: a hang, or near one
            raise AssertionError(f"a head of {file.stat().st_size} bytes took {longest:.1f} s of the processor")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > 200 << 10:
        raise AssertionError(f"memory grew by {grown >> 10} MiB")
    return {"heads": count, "readings refused, of three each": refused, "longest ms": round(longest * 1e3, 1),
            "MiB grown": grown >> 10}  # fmt: skip
