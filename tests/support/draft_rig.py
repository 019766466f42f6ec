"""Heads in the published layouts with random weights, their twins in plain torch, and rows to draft for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.models.program import program_of
from quire.gpu_worker.speculation.draws import draw
from quire.gpu_worker.state import RowState
from quire.proto.codec import i32
from quire.proto.messages import Admit, Lease, StepPlan
from quire.proto.work import Generate

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB = 48, 6, 2, 96, 320  # as tiny_models' BASE
DIM = HIDDEN // HEADS
ROWS, LENGTH, BLOCK, BLOCKS = 8, 128, 8, 160
CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip


def layer(prefix: str, inputs: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random tensors of one layer."""
    shapes = {
        "self_attn.q_proj": (HIDDEN, inputs), "self_attn.k_proj": (KV_HEADS * DIM, inputs),
        "self_attn.v_proj": (KV_HEADS * DIM, inputs), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    found = {f"{prefix}{name}.weight": torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    return found | {f"{prefix}post_attention_layernorm.weight": 1 + torch.randn(HIDDEN, generator=generator) * 0.1}


def eagle(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """An EAGLE head as it is published; its tensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors = layer("layers.0.", HIDDEN, generator) | {
        "fc.weight": torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.15
    }
    return write(folder, CONFIG, tensors)


def eagle3(folder: Path, seed: int = 0, own: int = 200) -> dict[str, torch.Tensor]:
    """An EAGLE-3 head as it is published, with a vocabulary of ``own`` tokens; its tensors."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.randperm(VOCAB, generator=generator)[:own].sort().values
    tensors = layer("midlayer.", 2 * HIDDEN, generator) | {
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN, generator=generator) * 0.15,
        "lm_head.weight": torch.randn(own, HIDDEN, generator=generator) * 0.3,
        "d2t": known - torch.arange(own),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, known, True),
    }
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        tensors[f"{name}.weight"] = 1 + torch.randn(HIDDEN, generator=generator) * 0.1
    return write(folder, CONFIG | {"draft_vocab_size": own}, tensors)


def medusa(folder: Path, heads: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Medusa's heads as they are published; their tensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.1
        tensors[f"{head}.0.linear.bias"] = torch.randn(HIDDEN, generator=generator) * 0.1
        tensors[f"{head}.1.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": heads, "medusa_num_layers": 1}))
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return tensors


def mtp(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Adds to a Qwen2 folder the layer of MiMo's that predicts a second token; its tensors."""
    generator, prefix = torch.Generator().manual_seed(seed), "model.mtp_layers.0."
    tensors = layer(prefix, HIDDEN, generator)
    tensors[f"{prefix}input_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.15
    for name in ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm"):
        tensors[f"{prefix}{name}.weight"] = 1 + torch.randn(HIDDEN, generator=generator) * 0.1
    for name, size in (("q", HIDDEN), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
        tensors[f"{prefix}self_attn.{name}_proj.bias"] = torch.randn(size, generator=generator) * 0.1
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return write(folder, config, load_file(folder / "model.safetensors") | tensors)


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A folder of ``config`` and ``tensors``, which are returned."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return tensors


# ---------------------------------------------------------------- twins: whole sequences, no cache


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, DIM] of positions 0, 1, ..."""
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def run_layer(w: dict[str, torch.Tensor], prefix: str, source: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """One layer over a whole sequence: the attention reads ``source``; [T, HIDDEN]."""

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ w[f"{prefix}{name}.weight"].T + w.get(f"{prefix}{name}.bias", 0.0)

    q = rotated(product("self_attn.q_proj", source).view(-1, HEADS, DIM)).transpose(0, 1)
    k = rotated(product("self_attn.k_proj", source).view(-1, KV_HEADS, DIM)).transpose(0, 1)
    v = product("self_attn.v_proj", source).view(-1, KV_HEADS, DIM).transpose(0, 1)
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
    out = (
        F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1).reshape(-1, HIDDEN)
    )
    x = residual + product("self_attn.o_proj", out)
    y = norm(x, w[f"{prefix}post_attention_layernorm.weight"])
    return x + product("mlp.down_proj", F.silu(product("mlp.gate_proj", y)) * product("mlp.up_proj", y))


def eagle_twin(w: dict[str, torch.Tensor], embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The hidden states [T, HIDDEN] that an EAGLE head makes."""
    x = torch.cat((embedded, hidden), -1) @ w["fc.weight"].T
    return run_layer(w, "layers.0.", x, x)


def eagle3_twin(w: dict[str, torch.Tensor], embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The same of EAGLE-3, of ``hidden`` [T, HIDDEN] behind ``fc``; without the last norm."""
    source = torch.cat(
        (norm(embedded, w["midlayer.input_layernorm.weight"]), norm(hidden, w["midlayer.hidden_norm.weight"])), -1
    )
    return run_layer(w, "midlayer.", source, hidden)


def mtp_twin(w: dict[str, torch.Tensor], embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The same of MiMo's layer, behind its norm."""
    prefix = "model.mtp_layers.0."
    embedded = torch.cat((torch.zeros(1, HIDDEN), embedded[1:]))
    parts = norm(hidden, w[f"{prefix}hidden_layernorm.weight"]), norm(embedded, w[f"{prefix}token_layernorm.weight"])
    x = torch.cat(parts, -1) @ w[f"{prefix}input_proj.weight"].T
    made = run_layer(w, prefix, norm(x, w[f"{prefix}input_layernorm.weight"]), x)
    return norm(made, w[f"{prefix}final_layernorm.weight"])


# ---------------------------------------------------------------- rows


class DraftRig:
    """Rows of a target whose steps are made by hand, as the worker makes them."""

    def __init__(self, target, blocks: int = BLOCKS, taps: tuple[int, ...] = ()) -> None:
        self.target, self.taps = target, taps
        self.state = RowState(ROWS, LENGTH, BLOCK, VOCAB, CPU)
        self.kv = KVCache(target.spec, blocks, BLOCK, target.cache_dtype, CPU)
        self.program = program_of(target, self.kv, self.state.tokens, self.state.tables, 64, taps=taps)
        self.free = list(range(blocks))[::-1]
        self.proposer = None
        self.crowded = False  # more rows run than may speculate
        self.tried = self.right = 0

    def admit(
        self, row: int, ids: list[int], params, seed: int = 0, chunk: int = 1000, cached: list[int] | None = None
    ) -> int:
        """``row`` begins with ``ids``; its prompt runs in chunks, and its first token is drawn. ``cached``: blocks that
        hold its beginning."""
        cached = cached or []
        self.state.apply(
            StepPlan(Lease(0, 0, 0), 0, admits=[Admit(row, 0, row, i32(ids), len(ids), Generate(params, seed), 1)]),
            self.kv,
        )
        if self.proposer:
            self.proposer.admit([row])
        self._set(row, cached)
        at = len(cached) * BLOCK
        while at < len(ids):
            count = min(chunk, len(ids) - at)
            self.grow(row, at + count)
            last = at + count == len(ids)
            tokens = self.run([row], [at], [count], [[at + count]] if last else [[]])
            at += count
        self.state.tokens_host[row, len(ids)] = tokens[0][0]
        self.state.known[row] += 1
        return tokens[0][0]

    def _set(self, row: int, blocks: list[int]) -> None:
        first = int(self.state.blocks_set[row])
        count = len(blocks)
        if count:
            plan = StepPlan(
                Lease(0, 0, 0), 0, delta_rows=i32([row] * count), delta_slots=i32(range(first, first + count)),
                delta_blocks=i32(blocks),
            )  # fmt: skip
            self.state.apply(plan, self.kv)
            if self.proposer:
                self.proposer.given(*self.state.last_change)

    def grow(self, row: int, length: int) -> None:
        """Blocks for ``length`` tokens."""
        lacking = -(-length // BLOCK) - int(self.state.blocks_set[row])
        self._set(row, [self.free.pop() for _ in range(lacking)])

    def run(self, rows, starts, counts, positions):
        """Run the target, and draw the tokens of ``positions`` of each row."""
        rows, starts, counts = (np.array(each, np.int64) for each in (rows, starts, counts))
        hidden = self.program.hidden(rows, starts, counts, np.arange(counts.sum()))
        if self.proposer:
            none = np.zeros(0, np.int64)
            run = SimpleNamespace(
                rows=rows, starts=starts, counts=counts, ends=starts + counts, sample_src=none, sample_rows=none,
                pure_decode=bool((counts == 1).all()),
            )  # fmt: skip
            given = self.program.tapped() if self.taps else hidden
            self.proposer.ran(run, None if self.crowded else given)
        drawn, firsts = [], counts.cumsum() - counts
        for row, start, first, wanted in zip(rows, starts, firsts, positions, strict=True):
            found = []
            for position in wanted:
                logits = self.program.head(hidden[first + position - start - 1 : first + position - start]).clone()
                found.append(int(draw(logits, self.state, np.array([row]), np.array([position]))[0]))
            drawn.append(found)
        return drawn

    def step(self, rows: list[int], most: int) -> None:
        """One step of ``rows``: draft at most ``most``, verify, keep."""
        known = self.state.known[rows].copy()
        drafts, found = np.zeros((len(rows), 1), np.int32), np.zeros(len(rows), np.int64)
        for row, length in zip(rows, known, strict=True):
            self.grow(row, length + most)
        if self.proposer and most:
            drafts, found = self.proposer.propose(np.array(rows), np.full(len(rows), most))
            for at, row in enumerate(rows):
                self.state.tokens_host[row, known[at] : known[at] + found[at]] = drafts[at, : found[at]]
        positions = [list(range(length, length + count + 1)) for length, count in zip(known, found, strict=True)]
        drawn = self.run(rows, known - 1, 1 + found, positions)
        kept = np.zeros(len(rows), np.int64)
        for at, row in enumerate(rows):
            while kept[at] < found[at] and drawn[at][kept[at]] == drafts[at, kept[at]]:
                kept[at] += 1
            count = int(kept[at]) + 1
            self.state.tokens_host[row, known[at] : known[at] + count] = drawn[at][:count]
            self.state.known[row] += count
        self.tried, self.right = self.tried + int(found.sum()), self.right + int(kept.sum())
        if self.proposer and most:
            self.proposer.kept(rows, found.tolist(), kept.tolist())

    def tokens(self, row: int, count: int) -> list[int]:
        """The first ``count`` tokens of ``row``."""
        return self.state.tokens_host[row, :count].tolist()
