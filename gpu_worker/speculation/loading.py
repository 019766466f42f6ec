"""Loads what drafts: a draft model or heads, before the memory that is left goes to the cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...proto.checkpoint.classifier_tokens import token_ids
from ...proto.checkpoint.model_config import ModelConfig, load_model_config, resolve_model
from ...proto.config import ConfigError, EngineArgs
from ...proto.readable import is_file
from ...proto.speculation import SpeculativeConfig, speculative_config
from ..device import LongSteps
from ..kv_cache import KVCache
from ..memory import step_bytes
from ..models.decoder import Decoder
from ..models.loader import load_model
from ..models.model import Model
from ..models.program import Program
from .draft_model import DraftModel, KeysAndValues
from .eagle import Eagle
from .head_model import Head
from .heads import load_head, taps_of, whole_of
from .medusa import Medusa, MedusaHead, load_medusa
from .passes import passes_of
from .proposer import Proposer

if TYPE_CHECKING:
    from ..state import RowState

log = logging.getLogger(__name__)

MODELS = ("draft_model", "eagle", "eagle3", "medusa", "mtp")
"""The methods that need weights of their own."""


class Drafting:
    """What was loaded for ``config``; ``length``: most tokens of a sequence that it drafts for."""

    def __init__(
        self, config: SpeculativeConfig, drafter: Model | list[MedusaHead] | None, target: Model, length: int
    ) -> None:
        """``drafter``: None where another process of this replica drafts."""
        self.config, self._drafter, self._target, self._length = config, drafter, target, length
        self.taps = taps_of(config.method or "", target.whole.num_layers)
        """Layers of the target before which it is to keep the hidden states of a step."""

    def block_bytes(self, block_size: int) -> int:
        """Bytes that its keys and values add to a block of the cache."""
        if not isinstance(self._drafter, Model):
            return 0
        return KVCache.block_bytes(self._drafter.spec, block_size, self._drafter.cache_dtype)

    def step_bytes(self, tokens: int, rows: int) -> int:
        """About the activations of its own passes, and what it keeps for ``rows`` rows."""
        if self._drafter is None:
            return 0
        kept = rows * max(16, 2 * self.config.drafts + 2) * self._target.whole.hidden_size * 4
        if not isinstance(self._drafter, Model):
            return kept + rows * self._target.whole.vocab_size * 4
        return kept + step_bytes(self._drafter.whole, tokens, rows, self._drafter.dtype.itemsize)

    def proposer(
        self,
        state: RowState,
        kv: KVCache,
        max_tokens: int,
        long: LongSteps | None = None,
        beside: Program | None = None,
    ) -> Proposer:
        """A proposer for the rows of ``state``, whose target has its keys and values in ``kv``; its steps on a CPU take
        the threads of ``beside``."""
        drafter, target = self._drafter, self._target
        if drafter is None:
            raise RuntimeError("another process of this replica drafts")
        if not isinstance(drafter, Model):
            return Medusa(state, drafter, target.dtype, target.whole.hidden_size)
        own = KVCache(drafter.spec, kv.num_blocks, kv.block_size, drafter.cache_dtype, state.device)
        passes = passes_of(drafter, own, state, long, beside)
        if not isinstance(drafter, Head):
            made: KeysAndValues = DraftModel(state, own, passes, max_tokens, self._length)
        else:
            made = Eagle(state, own, drafter, passes, self.config.drafts, max_tokens)
        made.beside = [(drafter, own)]
        kv.on_write = made.reach.written
        return made


class Drafts:
    """What was ``loaded`` for speculation, if anything, wherever the target's weights are. ``load`` reads it again."""

    def __init__(
        self, loaded: Drafting | None = None, load: Callable[[Model], Drafting | None] = lambda target: None
    ) -> None:
        self.loaded, self._load, self._dropped = loaded, load, False

    def put_away(self, level: int) -> None:
        """As ``rest.Weights.put_away``, before the target's: heads hold on to the target, so nothing is kept."""
        if level and self.loaded is not None:
            self.loaded, self._dropped = None, True

    def bring_back(self, target: Model) -> None:
        """It is on the device. Raises what the loader does."""
        if self._dropped:
            self.loaded, self._dropped = self._load(target), False

    @property
    def taps(self) -> tuple[int, ...]:
        """``Drafting.taps``; none where nothing is loaded."""
        return () if self.loaded is None else self.loaded.taps

    def block_bytes(self, block_size: int) -> int:
        """``Drafting.block_bytes``; 0 where nothing is loaded."""
        return 0 if self.loaded is None else self.loaded.block_bytes(block_size)

    def step_bytes(self, tokens: int, rows: int) -> int:
        """``Drafting.step_bytes``, likewise."""
        return 0 if self.loaded is None else self.loaded.step_bytes(tokens, rows)


def drafts_of(args: EngineArgs, model_config: ModelConfig, target: Model) -> Drafts:
    """What the flags ask to draft with. Raises ConfigError."""

    def load(target: Model) -> Drafting | None:
        return load_drafting(speculative_config(args), args, model_config, target)

    return Drafts(load(target), load)


def load_drafting(
    config: SpeculativeConfig | None, args: EngineArgs, model_config: ModelConfig, target: Model
) -> Drafting | None:
    """What ``config`` needs, as the target is; None where it needs no weights. Raises ConfigError."""
    if config is None or config.method not in MODELS or target.whole.outputs >= 0:
        return None
    leader, most = target.group.leader, model_config.max_model_len
    length = min(most, config.max_model_len or most)
    if config.method == "draft_model":
        if not leader:
            return Drafting(config, None, target, length)
        draft, own = _draft_model(config, args, model_config, target)
        return Drafting(config, draft, target, min(length, own))
    if not isinstance(target, Decoder) or target.group.shard.stages > 1:
        raise ConfigError(
            f"speculative_config: method {config.method!r} reads the hidden states of a model in one stage that quire "
            "knows; use ngram, suffix or draft_model."
        )
    shared = None if config.method == "medusa" else whole_of(target)
    if not leader:
        return Drafting(config, None, target, length)
    folder = None if config.model is None else resolve_model(config.model, config.revision, args.download_dir)
    if config.method == "medusa":
        if folder is None:
            raise ConfigError("speculative_config: method 'medusa' needs a model: the folder of its heads.")
        heads = load_medusa(folder, target)
        if len(heads) < config.drafts:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens {config.drafts} is more than the "
                f"{len(heads)} heads in {folder}."
            )
        return Drafting(config, heads, target, length)
    head = load_head(config.method or "", folder, model_config, target, shared)
    return Drafting(config, head, target, length)


def _draft_model(
    config: SpeculativeConfig, args: EngineArgs, model_config: ModelConfig, target: Model
) -> tuple[Model, int]:
    """The draft model, and how many tokens it can have before it."""
    if config.model is None:
        raise ConfigError("speculative_config: method 'draft_model' needs a model.")
    folder = resolve_model(config.model, config.revision, args.download_dir, load_format=args.load_format)
    own = load_model_config(folder, None, None, config.quantization)
    if own.vocab_size != model_config.vocab_size:
        raise ConfigError(
            f"speculative_config: the vocabulary of {folder} has {own.vocab_size} tokens, the target's "
            f"{model_config.vocab_size}; a draft model must have the target's tokenizer."
        )
    _same_tokens(Path(folder), Path(model_config.path))
    length = own.max_model_len
    own.max_model_len = min(length, model_config.max_model_len)
    draft = load_model(own, target.dtype, target.device, args.load_format, args.seed, quantization=config.quantization)
    if not isinstance(draft, Decoder):
        raise ConfigError(f"speculative_config: {folder} is no decoder that quire knows; use another draft model.")
    log.info("drafts by %s: %d layers of %d", folder, draft.whole.num_layers, draft.whole.hidden_size)
    return draft, length


def _same_tokens(folder: Path, target: Path) -> None:
    """Raises ConfigError where both folders have a tokenizer.json and some token has another id."""
    files = [each / "tokenizer.json" for each in (folder, target)]
    if not all(is_file(file) for file in files):
        return
    tables = [token_ids(each) for each in (folder, target)]
    odd = [token for token, number in tables[1].items() if tables[0].get(token, number) != number]
    if odd:
        raise ConfigError(
            f"speculative_config: token {odd[0]!r} is {tables[0][odd[0]]} in {folder} and {tables[1][odd[0]]} in "
            f"{target}; a draft model must have the target's tokenizer."
        )
