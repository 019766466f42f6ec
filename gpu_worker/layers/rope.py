"""Rotary positions: the rotation on a CPU, and tables of cosines and sines for every scaling transformers 5 knows.

A cached key keeps the rotation it was written with, so a position must be rotated alike whatever the length of its
sequence. Two types depend on that length in transformers; here they are:

- ``dynamic``: position p is rotated as transformers rotates it in a sequence of p + 1 tokens. Equal to transformers for
  sequences within the trained length, and for those that grow past it token by token; a *prompt* longer than the
  trained length is rotated there by its whole length.
- ``longrope``: the long factors where max_model_len exceeds the original length, else the short ones, as in vLLM.
  Equal to transformers whenever the sequence and max_model_len are on the same side of the original length.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from ...proto.config import ConfigError
from ..spec import RopeSpec

log = logging.getLogger(__name__)

# (inverse frequencies [R/2], or [P, R/2] where they depend on the position; factor on cosine and sine)
Speeds = tuple[torch.Tensor, float]


def rope_tables(spec: RopeSpec, max_len: int, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [max_len, rotary_dim / 2] float32, attention factors of yarn and longrope included.

    Raises ConfigError for an unknown type or a missing number.
    """
    if spec.rotary_dim < 2 or spec.rotary_dim % 2:
        raise ConfigError(f"config.json: rotary positions need an even number of dims, got {spec.rotary_dim}.")
    if spec.type not in _TYPES:
        raise ConfigError(f"config.json: rope type {spec.type!r} is not supported; supported are {sorted(_TYPES)}.")
    try:
        speeds, factor = _TYPES[spec.type](spec, max_len)
    except ConfigError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(
            f"config.json: rope type {spec.type!r} cannot be computed from {spec.scaling} ({error})."
        ) from error
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * speeds
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def query_scales(spec: RopeSpec, max_len: int, device: torch.device | None = None) -> torch.Tensor | None:
    """Factors [max_len, 1, 1] float32 by which queries grow with their position (Ministral 3); None: they do not."""
    if not spec.scaling.get("llama_4_scaling_beta"):
        return None
    beta, original = _number(spec, "llama_4_scaling_beta"), _number(spec, "original_max_position_embeddings")
    if original <= 0:
        raise ConfigError(f"config.json: original_max_position_embeddings must be above 0, got {original!r}.")
    lengths = torch.arange(max_len, dtype=torch.float32).div(original).floor()
    return (1 + beta * lengths.log1p())[:, None, None].to(device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> None:
    """Rotate the first R dims of x [T, heads, head_dim] in place; cos and sin [T, 1, R / 2].

    Dim i is rotated with dim i + R / 2 (NeoX's halves), or 2i with 2i + 1 (GPT-J's pairs) if ``interleaved``.
    """
    half = cos.shape[-1]
    if interleaved:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    rotated = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(rotated)


def _number(spec: RopeSpec, key: str, default: float | None = None) -> float:
    value = spec.scaling.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"config.json: rope type {spec.type!r} needs a number for {key}, got {value!r}.")
    if key == "factor" and not 0 < value < math.inf:
        raise ConfigError(f"config.json: rope type {spec.type!r} needs a factor above 0, got {value!r}.")
    return value


def _powers(spec: RopeSpec) -> torch.Tensor:
    return torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim


def _default(spec: RopeSpec, max_len: int) -> Speeds:
    return 1.0 / (spec.theta ** _powers(spec)), 1.0


def _linear(spec: RopeSpec, max_len: int) -> Speeds:
    return _default(spec, max_len)[0] / _number(spec, "factor"), 1.0


def _dynamic(spec: RopeSpec, max_len: int) -> Speeds:
    factor, dim = _number(spec, "factor"), spec.rotary_dim
    if max_len <= spec.trained_len:
        return _default(spec, max_len)
    lengths = torch.arange(1, max_len + 1).clamp(min=spec.trained_len)[:, None]
    base = spec.theta * ((factor * lengths / spec.trained_len) - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / (base ** _powers(spec)), 1.0


def _yarn(spec: RopeSpec, max_len: int) -> Speeds:
    original = _number(spec, "original_max_position_embeddings")
    factor = _number(spec, "factor", spec.trained_len / original)
    dim, theta, get = spec.rotary_dim, spec.theta, spec.scaling.get

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if get("attention_factor") is not None:
        attention = _number(spec, "attention_factor")
    elif get("mscale") and get("mscale_all_dim"):
        attention = mscale(_number(spec, "mscale")) / mscale(_number(spec, "mscale_all_dim"))
    else:
        attention = mscale(1.0)

    def dim_of(rotations: float) -> float:
        """The dim that makes so many ``rotations`` within the original length."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(get("beta_fast") or 32), dim_of(get("beta_slow") or 1)
    if get("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)  # 1 where a dim rotates fast enough to stay as it was trained
    slow = theta ** _powers(spec)
    return 1.0 / (factor * slow) * (1 - kept) + 1.0 / slow * kept, attention


def _llama3(spec: RopeSpec, max_len: int) -> Speeds:
    speeds = _default(spec, max_len)[0]
    factor, original = _number(spec, "factor"), _number(spec, "original_max_position_embeddings")
    low, high = _number(spec, "low_freq_factor"), _number(spec, "high_freq_factor")
    waves = 2 * math.pi / speeds
    smooth = (original / waves - low) / (high - low)
    between = (1 - smooth) * speeds / factor + smooth * speeds
    scaled = torch.where(waves > original / low, speeds / factor, between)
    return torch.where(waves < original / high, speeds, scaled), 1.0


def _longrope(spec: RopeSpec, max_len: int) -> Speeds:
    original = _number(spec, "original_max_position_embeddings")
    factor = _number(spec, "factor", spec.trained_len / original)
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    name = "long_factor" if max_len > original else "short_factor"
    if name == "long_factor":
        log.info(
            "longrope: max_model_len %d is past the original %d, so every sequence uses the long factors; "
            "--max-model-len %d would use the short ones",
            max_len, original, original,
        )  # fmt: skip
    factors = spec.scaling.get(name)
    if not isinstance(factors, list) or len(factors) != spec.rotary_dim // 2:
        count = len(factors) if isinstance(factors, list) else factors
        raise ConfigError(f"config.json: longrope needs {spec.rotary_dim // 2} numbers in {name}, got {count}.")
    stretch = torch.tensor(factors, dtype=torch.float32)
    return 1.0 / (stretch * spec.theta ** _powers(spec)), _number(spec, "attention_factor", attention)


def _proportional(spec: RopeSpec, max_len: int) -> Speeds:
    speeds = _default(spec, max_len)[0] / _number(spec, "factor", 1.0)
    speeds[int(_number(spec, "fraction", 1.0) * spec.rotary_dim // 2) :] = 0
    return speeds, 1.0


_TYPES: dict[str, Callable[[RopeSpec, int], Any]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3,
    "longrope": _longrope, "proportional": _proportional,
}  # fmt: skip
