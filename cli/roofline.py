"""What fits on so many devices, and how fast it could be at best.

Memory is the worker's sum: a share of the device, less weights, one worst step and what CUDA keeps for itself; the rest
is KV cache. Speed is the roofline: bytes that a step must read over the bandwidth, or products over their peak. Real
steps take longer; what one device sends to another is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..gpu_worker.memory import CPU_CACHE_CAP, GIB, step_bytes
from .cards import Sheet
from .sizes import Format, Sizes

CONTEXT_BYTES = GIB
"""Of CUDA's context, its libraries and graphs: an assumption. The worker measures them."""
MOST_DEVICES = 64


@dataclass(frozen=True)
class Load:
    """What is asked for: lengths are tokens, ``cache`` is bytes of a number in the KV cache (None: the model's), and
    ``int8`` says that each of a token's heads has a scale beside."""

    length: int
    rows: int
    step_tokens: int
    block: int = 16
    utilization: float = 0.9
    cache: int | None = None
    int8: bool = False


@dataclass(frozen=True)
class Plan:
    """A format on so many devices; bytes are of each of them, and speeds of all together in tokens a second."""

    devices: int
    weights: int
    step: int
    token: int  # of the KV cache of one token
    tokens: int  # that the cache holds
    longest: int  # context of one request; 0: not one block fits
    rows: int  # at the length asked for, at once
    decode_one: float = 0.0
    decode_full: float = 0.0
    prefill: float = 0.0

    def holds(self, length: int) -> bool:
        """Whether a request of so many tokens fits."""
        return self.longest >= length


def plan(part: Sizes, fmt: Format, devices: int, memory: int, load: Load, sheet: Sheet | None) -> Plan:
    """What ``part``, one of ``devices`` equal shares of a model, leaves room for. Without a ``sheet`` no speeds."""
    item = load.cache or fmt.itemsize
    weights, token = part.weight_bytes(fmt), part.token_bytes(item, load.int8)
    step = step_bytes(part.spec, load.step_tokens, load.rows, fmt.itemsize)
    own = CONTEXT_BYTES if sheet else 0
    room = int(load.utilization * memory) - weights - step - own
    if sheet is None:  # where the worker leaves memory to others
        room = min(room, max(CPU_CACHE_CAP, -(-load.length // load.block) * load.block * token))
    blocks = max(0, room) // max(1, token * load.block)
    tokens = blocks * load.block
    rows = min(tokens // load.length, load.rows)
    found = Plan(devices, weights, step, token, tokens, tokens, rows)
    if sheet is None or not rows:
        return found
    return Plan(
        devices, weights, step, token, tokens, tokens, rows,
        decode_one=1 / decode_seconds(part, fmt, 1, load, item, sheet),
        decode_full=rows / decode_seconds(part, fmt, rows, load, item, sheet),
        prefill=0.0 if fmt.rest == 32 else prefill_speed(part, load.length, sheet),  # sheets are of bfloat16
    )  # fmt: skip


def decode_seconds(part: Sizes, fmt: Format, rows: int, load: Load, item: int, sheet: Sheet) -> float:
    """Seconds of a decode step of ``rows`` rows, each half as long as the longest: the reading of their keys and
    values, and the larger of the reading of the weights and the products."""
    kept = rows * part.token_bytes(item, load.int8, max(1, load.length // 2)) / sheet.bandwidth
    read = part.read_bytes(fmt, rows) / sheet.bandwidth
    return kept + max(read, 2 * rows * (part.multiplied + part.outputs) / sheet.products)


def prefill_speed(part: Sizes, length: int, sheet: Sheet) -> float:
    """Tokens a second of one prompt of ``length`` tokens: each is multiplied with the layers' weights, and its query
    with the keys before it, half of them on average."""
    spec = part.spec
    spans = sum(min(length / 2, span or length) for span in spec.windows)
    return sheet.products / (2 * part.multiplied + 4 * spec.heads * spec.head_dim * spans)
