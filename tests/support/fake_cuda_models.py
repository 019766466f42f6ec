"""Models without files on a ``FakeCuda``, and a hand that counts what each step asks of the device."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import toy_codes
from fake_cuda import CUDA, CudaTensor, FakeCuda, Note, Violation
from worker_toys import LEASE, Hand, plan

from quire.gpu_worker import graphs
from quire.gpu_worker.kernels.card import card_of
from quire.gpu_worker.layers.formats import cuda
from quire.gpu_worker.layers.formats.measured import Table, table_of
from quire.gpu_worker.lora.slots import LoraSpec
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.parallel.one_shot import LIMITS as SHARED
from quire.gpu_worker.parallel.one_shot import OneShot
from quire.gpu_worker.parallel.parallel import Ranks
from quire.gpu_worker.pooling import Pooler
from quire.gpu_worker.runner import Runner
from quire.gpu_worker.spec import Shard
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.checkpoint.pooler_config import pooler_of
from quire.proto.codec import from_i32, i32
from quire.proto.config import EngineArgs
from quire.proto.messages import Admit
from quire.proto.pooling import PoolingParams
from quire.proto.work import Pool

VOCAB, LAYERS = 320, 3
LIMITS = {"rows": 8, "length": 128, "block_size": 16, "blocks": 64, "max_tokens": 256, "vocab": VOCAB}
BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
_GPT = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **BASE},
    "window": {"architectures": ["MistralForCausalLM"], **BASE, "sliding_window": 24},
    "query and key norms": {"architectures": ["Qwen3ForCausalLM"], **BASE},
    "soft caps, sandwich norms": {
        "architectures": ["Gemma2ForCausalLM"], **BASE, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 32,
        "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "norms of all heads": {"architectures": ["Olmo2ForCausalLM"], **BASE, "head_dim": None},
    "clipped": {"architectures": ["OlmoForCausalLM"], **BASE, "head_dim": None, "clip_qkv": 8.0},
    "LayerNorm, learned positions": {
        "architectures": ["GPT2LMHeadModel"], "vocab_size": VOCAB, "n_embd": 64, "n_layer": LAYERS, "n_head": 4,
        "n_positions": 512, "activation_function": "gelu_new",
    },
    "ALiBi": {"architectures": ["BloomForCausalLM"], **_GPT, "n_layer": LAYERS, "n_head": 4},
    "parallel halves": {"architectures": ["GPTJForCausalLM"], "vocab_size": VOCAB, "n_embd": 64, "n_layer": LAYERS,
                        "n_head": 4, "n_positions": 512, "rotary_dim": 8, "activation_function": "gelu_new"},
    "norms behind": {
        "architectures": ["OPTForCausalLM"], **_GPT, "ffn_dim": 96, "do_layer_norm_before": False,
        "word_embed_proj_dim": 32, "activation_function": "relu",
    },
    "scaled residuals": {
        "architectures": ["GraniteForCausalLM"], **BASE, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
        "residual_multiplier": 0.3, "logits_scaling": 2.5,
    },
    "experts": {"architectures": ["MixtralForCausalLM"], **BASE, "num_local_experts": 8, "num_experts_per_tok": 2},
    "experts and what all go through": {
        "architectures": ["Qwen2MoeForCausalLM"], **BASE, **_EXPERTS, "shared_expert_intermediate_size": 40,
    },
    "experts, sinks, windows": {
        "architectures": ["GptOssForCausalLM"], **BASE, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "codes": {"architectures": ["LlamaForCausalLM"], **BASE, "quantization_config": toy_codes.CONFIG},
    "int8 rows": {"architectures": ["LlamaForCausalLM"], **BASE, "quantization_config": toy_codes.BYTES},
    "experts of codes": {
        "architectures": ["MixtralForCausalLM"], **BASE, "num_local_experts": 8, "num_experts_per_tok": 2,
        "quantization_config": toy_codes.CONFIG,
    },
}  # fmt: skip
POOLED: dict[str, dict[str, Any]] = {
    "encoder": {
        "architectures": ["BertModel"], **_GPT, "intermediate_size": 128, "hidden_act": "gelu", "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    },
    "encoder that classifies": {
        "architectures": ["BertForSequenceClassification"], **_GPT, "intermediate_size": 128, "hidden_act": "gelu",
        "type_vocab_size": 2, "layer_norm_eps": 1e-12, "id2label": {"0": "no", "1": "yes", "2": "perhaps"},
    },
    "decoder": {"architectures": ["LlamaForCausalLM"], **BASE},
}  # fmt: skip


@contextmanager
def fake_device(**options: Any) -> Iterator[FakeCuda]:
    """A device; what the worker keeps of it for the life of a process goes with it."""
    kept = (card_of, table_of, graphs._stream)
    try:
        for each in kept:
            each.cache_clear()
        with FakeCuda(**options) as device:
            yield device
    finally:
        for each in kept:
            each.cache_clear()


@contextmanager
def products(tiles: bool) -> Iterator[None]:
    """No product is measured for models that are loaded here: of few rows the library is the fastest, or ``tiles``."""
    times = itertools.count(0, -1 if tiles else 1)
    with mock.patch.object(cuda, "table_of", lambda device: Table(card_of(device), lambda call: next(times), None)):
        yield


@contextmanager
def ranks(device: FakeCuda, size: int, one_shot: bool) -> Iterator[Ranks]:
    """The leader of ``size`` tensor ranks, ``one_shot`` for small sums or NCCL for all. What it exchanges with the
    others, who are not there, counts as launched."""

    def exchange(name: str, *args: Any, **_: Any) -> None:
        for tensor in [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]:
            if isinstance(tensor, torch.Tensor) and not (isinstance(tensor, CudaTensor) and tensor.is_contiguous()):
                raise Violation(f"{name} of a tensor {tuple(tensor.shape)} that is on the host or not contiguous")
        device.note("torch", f"nccl {name}")

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(dist, "init_process_group", lambda *args, **named: None))
        patches.enter_context(mock.patch.object(dist, "new_group", lambda *args, **named: object()))
        for name in ("all_reduce", "broadcast", "gather", "all_gather", "send", "recv"):
            patches.enter_context(mock.patch.object(dist, name, partial(exchange, name)))
        group = Ranks(Shard(0, size), dist.HashStore(), CUDA, one_shot=False)
        if one_shot:
            group._one_shot = OneShot(torch.empty(SHARED[size], dtype=torch.uint8, device=CUDA), "ranks")
        yield group


def make(
    folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, pools: bool = False, tiles: bool = False,
    group: Ranks | None = None, lora: LoraSpec | None = None,
) -> Any:  # fmt: skip
    """The model of a config.json on the fake device, and how it pools."""
    (folder / "config.json").write_text(json.dumps({key: v for key, v in config.items() if v is not None}))
    found = load_model_config(str(folder))
    args = EngineArgs(model=str(folder), runner="pooling", convert="auto") if pools else None
    pooler = None if args is None else pooler_of(found, args)
    with products(tiles):
        return load_model(found, dtype, CUDA, "dummy", pooler=pooler, group=group, lora=lora), pooler


class _Layer:
    """A decoder's layer; what it asks of the device is noted as its own."""

    def __init__(self, device: FakeCuda, layer: Any, number: int):
        self._device, self._layer, self._name = device, layer, f"layer {number}"

    def __call__(self, *args: Any) -> Any:
        with self._device.at(self._name):
            return self._layer(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class CountingHand(Hand):
    """Steps within ``device.step()``; ``seen`` has what those asked that were given a name by ``called``."""

    def __init__(self, device: FakeCuda, model: Any, pooler: Any = None, **limits: Any):
        if hasattr(model, "layers") and not isinstance(model.layers[0], _Layer):
            model.layers = [_Layer(device, layer, number) for number, layer in enumerate(model.layers)]
        super().__init__(model, device=CUDA, dtype=model.cache_dtype, **{**LIMITS, **limits})
        made = None if pooler is None else Pooler(pooler, model)
        self.runner = Runner(model, self.state, self.kv, self.runner.max_tokens, made, model.group)
        self.device, self.seen, self.name = device, dict[str, Any](), ""

    def called(self, name: str) -> CountingHand:
        """The next step's name."""
        self.name = name
        return self

    def pool(self, row: int, ids: list[int], **params: Any) -> None:
        """Queue a prompt that is pooled."""
        self.admit(row, ids)
        self.queue["admits"][-1] = Admit(row, row, 0, i32(ids), len(ids), Pool(PoolingParams(**params)))

    def send(self) -> list[int]:
        self.step += 1
        queued, self.queue = self.queue, {}
        self.device.take()
        with self.device.step():
            outcome = self.runner.launch(plan(self.step, **queued))
        if self.name:
            self.seen[self.name] = summary(self.device.take())
            self.name = ""
        self.result = outcome.result(LEASE, self.step)
        return from_i32(self.result.tokens)


def summary(notes: list[Note]) -> dict[str, Any]:
    """What one step asked, in numbers: launches by name in the middle layer and in all, copies and waits."""
    middle = [note for note in notes if note.where == f"layer {LAYERS // 2}"]
    kinds = Counter(note.kind for note in notes)
    told: dict[str, Any] = {"launches": sum(_launches(notes).values())}
    if middle:
        told |= {"in a layer": sum(_launches(middle).values()), "layer": _launches(middle)}
    told["outside"] = _launches([note for note in notes if not note.where.startswith("layer")])
    told |= {"up": kinds["h2d"], "down": kinds["d2h"], "waits": kinds["wait"], "pinned": kinds["pin"]}
    if kinds["replay"]:
        told["graphs"] = kinds["replay"]
    return told


def _launches(notes: list[Note]) -> dict[str, int]:
    names = (note.name.partition("(")[0] for note in notes if note.kind in ("triton", "torch"))
    return dict(sorted(Counter(names).items()))


def signatures(notes: list[Note]) -> dict[str, list[str]]:
    """Of each of Triton's kernels the types that its tensors had."""
    found: dict[str, set[str]] = {}
    for note in notes:
        if note.kind == "triton":
            name, _, types = note.name.partition("(")
            found.setdefault(name, set()).add(types.rstrip(")"))
    return {name: sorted(types) for name, types in sorted(found.items())}
