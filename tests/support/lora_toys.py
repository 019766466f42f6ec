"""Adapters of tiny models, made by PEFT; PEFT's own logits; and a hand whose rows have adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
from worker_toys import CPU, Hand

from quire.gpu_worker.lora.slots import LoraSpec
from quire.gpu_worker.lora.target import Adapter, Matrices
from quire.gpu_worker.models.adapter_reader import read_adapter
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.params import SamplingParams

LENGTH, BLOCK, MAX_RANK = 128, 8, 512
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LLAMA: list[dict[str, Any]] = [
    {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    {"r": 16, "lora_alpha": 32, "target_modules": [*ATTENTION, *MLP]},
    {"r": 1, "lora_alpha": 4, "target_modules": ["o_proj"]},
    {"r": 33, "use_rslora": True, "target_modules": ["k_proj", "gate_proj"]},
    {"r": 64, "lora_alpha": 16, "target_modules": r".*\.(q_proj|down_proj)"},
    {"r": 4, "target_modules": "all-linear"},
    {"r": 8, "target_modules": ["up_proj", "q_proj"], "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"up_proj": 1}},
    {"r": 8, "target_modules": ["q_proj"], "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 12}},
    {"r": 5, "target_modules": ["v_proj", "down_proj"], "layers_to_transform": [0, 2]},
    {"r": 300, "lora_alpha": 40, "target_modules": [*ATTENTION], "exclude_modules": ["o_proj"]},
    {"r": 7, "target_modules": ["embed_tokens", "q_proj"]},
    {"r": 9, "target_modules": ["lm_head", "k_proj"]},
]
"""What the adapters of a Llama are made with: mixed ranks, scales and targets."""
GPT2: list[dict[str, Any]] = [
    {"r": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True},
    {"r": 3, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    {"r": 16, "use_rslora": True, "target_modules": ["mlp.c_proj"], "fan_in_fan_out": True},
    {"r": 5, "target_modules": ["wte"]},
    {"r": 512, "lora_alpha": 64, "target_modules": ["attn.c_proj"], "fan_in_fan_out": True},
    {"r": 33, "target_modules": "all-linear", "fan_in_fan_out": True},
    {"r": 1, "lora_alpha": 3, "target_modules": r".*\.[02]\.mlp\.c_(fc|proj)", "fan_in_fan_out": True},
    {"r": 6, "target_modules": ["lm_head", "c_fc"], "fan_in_fan_out": True},
    {
        "r": 8,
        "target_modules": ["c_attn", "c_fc"],
        "rank_pattern": {"c_fc": 2},
        "alpha_pattern": {"h.1.attn.c_attn": 30},
        "fan_in_fan_out": True,
    },
    {
        "r": 4,
        "target_modules": ["c_attn"],
        "layers_to_transform": [1, 2],
        "layers_pattern": "h",
        "fan_in_fan_out": True,
    },
    {"r": 64, "use_rslora": True, "target_modules": ["c_proj"], "exclude_modules": ["mlp.c_proj"]},
    {"r": 2, "lora_alpha": 5, "target_modules": ["transformer.h.1.mlp.c_fc", "wte"], "fan_in_fan_out": True},
]
MIXTRAL: list[dict[str, Any]] = [
    {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    {"r": 4, "target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    {"r": 3, "target_modules": ["k_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    {
        "r": 4,
        "target_modules": ["v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {r"experts\.gate_up_proj": 2},
        "alpha_pattern": {"down_proj": 3, "mlp.experts": 50},
    },
    {"r": 512, "lora_alpha": 64, "target_modules": ["k_proj", "o_proj"]},
    {"r": 33, "use_rslora": True, "target_modules": "all-linear"},
    {"r": 1, "target_modules": r".*\.[02]\..*(q|v)_proj"},
    {"r": 6, "target_modules": ["embed_tokens", "lm_head"]},
    {"r": 5, "target_modules": ["q_proj"], "layers_to_transform": 1, "target_parameters": ["experts.gate_up_proj"]},
    {"r": 8, "target_modules": [*ATTENTION], "rank_pattern": {r"layers\.1\..*": 3}, "exclude_modules": ["v_proj"]},
    {"r": 16, "use_rslora": True, "target_modules": ["o_proj"], "target_parameters": ["mlp.experts.down_proj"]},
]


class Oracle:
    """transformers' model of ``folder`` with adapters of PEFT, made with ``configs`` and saved under ``to``."""

    def __init__(self, folder: Path, configs: list[dict[str, Any]], to: Path) -> None:
        import peft

        self.names = [f"a{number}" for number in range(len(configs))]
        self.folders = [to / name for name in self.names]
        self.models = []
        for number, config in enumerate(configs):
            with torch.random.fork_rng():
                torch.manual_seed(number)
                made = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **config)
                model = peft.get_peft_model(tiny_models.reference(folder), made).eval()
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        if "lora_" in name:
                            parameter.normal_(0, 0.2)
            model.save_pretrained(self.folders[number], save_embedding_layers=False)
            self.models.append(model)
        self.base = tiny_models.reference(folder)

    @torch.inference_mode()
    def logits(self, ids: list[int], number: int) -> torch.Tensor:
        """[len(ids), vocabulary] with adapter ``number``; -1: without any."""
        model = self.base if number < 0 else self.models[number]
        return model(torch.tensor([ids])).logits[0].float()


def load(folder: Path, slots: int, group: Any = None, fully_sharded: bool = False, **more: Any) -> Any:
    """The model of ``folder`` in float32 with room for adapters."""
    config, spec = load_model_config(str(folder), LENGTH), LoraSpec(slots, MAX_RANK, fully_sharded=fully_sharded)
    return load_model(config, torch.float32, CPU, group=group, lora=spec, **more)


def random_adapter(model: Any, rank: int, seed: int, only: Callable[[str], bool] = lambda name: True) -> Adapter:
    """Random matrices, without a file, for every product of ``model`` whose name ``only`` lets through."""
    chance, found = torch.Generator().manual_seed(seed), {}
    for name, target in model.adapters.targets.targets.items():
        if only(name):
            sizes = [(rank, len(target.columns), len(piece.rows)) for piece in target.pieces]
            found[name] = tuple(
                Matrices(torch.randn(r, i, generator=chance) / 5, torch.randn(o, r, generator=chance) / 5, 1.5, r)
                for r, i, o in sizes
            )
    return Adapter(f"random {seed}", found)


def install(model: Any, slot: int, adapter: Adapter) -> None:
    """As a worker does between two steps."""
    slots = model.adapters
    kept = slots.kept(adapter)
    slots.begin_load(slot)
    slots.install(slot, slots.ready(slot, kept))


def put(model: Any, slot: int, folder: Path) -> None:
    """The adapter in ``folder`` into a slot."""
    slots = model.adapters
    read = read_adapter(folder.name, folder, slots.targets, slots.max_rank, slots.dtype, slots.kept_dtype)
    install(model, slot, read)


def hand_of(model: Any, rows: int = 40, blocks: int = 400, max_tokens: int = 512) -> Hand:
    return Hand(
        model, rows=rows, length=LENGTH, block_size=BLOCK, blocks=blocks, max_tokens=max_tokens,
        vocab=model.whole.vocab_size, mode="raw_logits",
    )  # fmt: skip


def greedy(vocab: int = 0) -> SamplingParams:
    """Greedy tokens, and with ``vocab`` the logits of the prompt too."""
    return SamplingParams(temperature=0.0, prompt_logprobs=vocab or None)


def admit(hand: Hand, row: int, ids: list[int], slot: int, vocab: int = 0) -> None:
    """A greedy row with what is in ``slot``; -1: nothing. With ``vocab`` it tells its prompt's logits."""
    told = {"prompt_logprobs_from": 1} if vocab else {}
    hand.admit(row, ids, greedy(vocab), slot=slot, **told)


def run(hand: Hand, prompts: list[list[int]], slots: list[int], chunk: int, new: int) -> tuple[list[Any], list[Any]]:
    """``prompts`` side by side, each in its row, in chunks, and ``new`` greedy tokens of each: of each the logits
    [len - 1, vocabulary] of all but its last token, and the tokens."""
    vocab, rows = hand.state.vocab_size, range(len(prompts))
    parts: list[list[tuple[int, torch.Tensor]]] = [[] for _ in rows]
    tokens: list[list[int]] = [[] for _ in rows]
    for row, ids in enumerate(prompts):
        admit(hand, row, ids, slots[row], vocab)
    while any(len(found) < new for found in tokens):
        chunks = [(row, min(chunk, hand.lengths[row] - hand.done[row])) for row in rows if len(tokens[row]) < new]
        for row, token in hand.run(*chunks).items():
            tokens[row].append(token)
        order = [row for row, _ in sorted(chunks, key=lambda each: each[1] != 1)]
        for part in hand.result.prompts:
            parts[order[part.at]].append((part.start, _logits(part.logprobs, vocab)))
    none = (1, torch.zeros(0, vocab))
    return [torch.cat([each for _, each in sorted([none, *found], key=lambda one: one[0])]) for found in parts], tokens


def _logits(told: Any, vocab: int) -> torch.Tensor:
    ids = np.frombuffer(told.ids, np.int32).reshape(-1, vocab + 1)[:, 1:].astype(np.int64)
    values = np.frombuffer(told.values, np.float32).reshape(-1, vocab + 1)[:, 1:]
    logits = np.full(ids.shape, np.nan, np.float32)
    np.put_along_axis(logits, ids, values, axis=1)
    return torch.from_numpy(logits)


def check(
    oracle: Oracle, prompts: list[list[int]], slots: list[int], found: tuple[list[Any], list[Any]], near: float
) -> None:
    """Logits within ``near`` of PEFT's, and tokens that are its most likely ones."""
    for ids, slot, logits, tokens in zip(prompts, slots, *found, strict=True):
        wanted = oracle.logits([*ids, *tokens], slot)
        far = (wanted[: len(ids) - 1] - logits).abs().max() if len(ids) > 1 else 0.0
        assert far <= near, f"logits with adapter {slot} are off by {far}"
        best = wanted[len(ids) - 1 : -1].max(-1)
        of_tokens = wanted[len(ids) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (best.values - of_tokens <= near).all(), f"tokens with adapter {slot}"
