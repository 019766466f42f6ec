"""Triton code of ``masks``; read its docstring first."""

import triton
import triton.language as tl

USES = tl.constexpr(9)
PROMPT_LEN = tl.constexpr(10)
ALLOWED = tl.constexpr(16)
BANNED = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize_on_alignment=["rows", "packed"])
def mask_bits_kernel(
    logits, stride, bits, bits_stride, rows, packed, vocab,
    BY_ROW: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one slot; nothing is read but the bits."""
    slot = tl.program_id(0)
    row = slot.to(tl.int64)
    used = 1
    if BY_ROW:
        used = tl.load(packed + slot * COLUMNS + USES) & ALLOWED
        row = tl.load(rows + slot)
    if used != 0:
        tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocab
        word = tl.load(bits + row * bits_stride + tokens // 32, mask=inside, other=-1)
        banned = ((word >> (tokens % 32)) & 1) == 0
        tl.store(logits + slot.to(tl.int64) * stride + tokens, BANNED, mask=inside & banned)


@triton.jit(do_not_specialize_on_alignment=["rows", "positions", "packed", "lasts", "starts", "prefixes"])
def ban_words_kernel(
    logits, stride, slots, lasts, starts, prefixes, history, history_stride, rows, positions, packed,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One word."""
    word = tl.program_id(0)
    slot = tl.load(slots + word)
    start = tl.load(starts + word)
    length = tl.load(starts + word + 1) - start
    position = tl.load(positions + slot).to(tl.int32)
    if position - tl.load(packed + slot * COLUMNS + PROMPT_LEN) >= length:
        history += tl.load(rows + slot) * history_stride + position - length
        differ = 0
        for begin in range(0, length, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            inside = at < length
            want = tl.load(prefixes + start + at, mask=inside, other=0)
            have = tl.load(history + at, mask=inside, other=0)
            differ += tl.sum((want != have).to(tl.int32), 0)
        if differ == 0:
            tl.store(logits + slot.to(tl.int64) * stride + tl.load(lasts + word), BANNED)
