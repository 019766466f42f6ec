"""How many blocks a worker's cache has, of what was measured."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..proto.checkpoint.model_config import ModelConfig
from ..proto.config import EngineArgs
from .kv_cache import KVCache
from .memory import Budget, fit

if TYPE_CHECKING:
    import torch

    from .models.model import Model

log = logging.getLogger(__name__)


def blocks_that_fit(
    args: EngineArgs, config: ModelConfig, model: Model, dtype: torch.dtype, budget: Budget, max_rows: int
) -> int:
    """The number of blocks of the cache of ``model`` in ``dtype``. Raises ConfigError as ``memory.fit`` does.

    An encoder keeps nothing in them: there are as many as its ``max_rows`` rows could ever fill.
    """
    if not budget.block_bytes:
        return max_rows * -(-config.max_model_len // budget.block_size)
    blocks, cache = fit(args, budget, config.max_model_len), model.cache_dtype
    if cache != dtype:
        wide = KVCache.block_bytes(model.spec, budget.block_size, dtype)
        log.info("the KV cache is in %s: %d blocks, where the same memory holds %d in %s", str(cache)[6:], blocks,
                 blocks * budget.block_bytes // wide, str(dtype)[6:])  # fmt: skip
    return blocks
