"""For the worker's tests: a toy model with the decoder's interface, and a hand that writes step plans."""

from types import SimpleNamespace

import numpy as np
import torch

from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.runner import Runner
from quire.gpu_worker.sampling.followers import Follower
from quire.gpu_worker.sampling.processors import Processors
from quire.gpu_worker.state import RowState
from quire.proto.codec import from_f32, from_i32, i32, u64
from quire.proto.messages import Admit, Lease, StepPlan
from quire.proto.params import SamplingParams
from quire.proto.structured import StructuredOutputsParams
from quire.proto.work import Generate, with_adapter

VOCAB, HIDDEN, LAYERS, HEADS, DIM = 97, 16, 2, 2, 8
GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")
LEASE = Lease(0, 0, 0)


class ToyModel:
    """Attention over every earlier token through the block table: a wrong block or position changes the logits."""

    adapters = given = None
    device = CPU

    def __init__(self, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.spec = SimpleNamespace(
            num_layers=LAYERS,
            kv_heads=(HEADS,) * LAYERS,
            head_dim=DIM,
            hidden_size=HIDDEN,
            intermediate_size=32,
            vocab_size=VOCAB,
        )
        self.cache_dtype = torch.float32
        self.embed = torch.randn(VOCAB, HIDDEN, generator=gen)
        self.place = torch.randn(4096, HIDDEN, generator=gen)
        self.head = torch.randn(HIDDEN, VOCAB, generator=gen) * 0.2
        self.batches = []

    def forward(self, batch, kv):
        self.batches.append(batch)
        hidden = self.embed[batch.token_ids] + self.place[batch.positions]
        for layer in range(LAYERS):
            hidden = hidden + self._layer(hidden, batch, kv.k[layer], kv.v[layer])
        return hidden if batch.outputs is None else hidden[batch.outputs]

    def _layer(self, hidden, batch, keys, values):
        parts = hidden.view(-1, HEADS, DIM)
        for token, slot in enumerate(batch.slots.tolist()):
            if slot >= 0:
                keys[slot // batch.block_size, slot % batch.block_size] = parts[token]
                values[slot // batch.block_size, slot % batch.block_size] = parts[token].roll(1)
        out = torch.zeros_like(hidden)
        starts = batch.query_starts.tolist()
        for row, context in enumerate(batch.context_lens.tolist()):
            blocks = batch.block_tables[row, : -(-context // batch.block_size)].long()
            k, v = (cache[blocks].reshape(-1, HEADS, DIM)[:context] for cache in (keys, values))
            for token in range(starts[row], starts[row + 1]):
                seen = context - (starts[row + 1] - 1 - token)
                if seen > 0:
                    scores = (parts[token].unsqueeze(0) * k[:seen]).sum(-1).softmax(0)
                    out[token] = (scores.unsqueeze(-1) * v[:seen]).sum(0).reshape(-1)
        return out

    def logits(self, hidden):
        """In float64, so that they are the same however many rows are multiplied, and by whatever processor."""
        return (hidden.double() @ self.head.double()).float()


class Hand:
    """Writes plans for one runner and keeps its own simple books: rows, lengths, blocks."""

    def __init__(
        self,
        model,
        rows=8,
        length=64,
        block_size=8,
        blocks=64,
        max_tokens=64,
        vocab=VOCAB,
        device=CPU,
        dtype=torch.float32,
        mode="raw_logprobs",
        grammars=None,
        functions=None,
    ):
        self.block_size = block_size
        self.state = RowState(
            rows, length, block_size, vocab, device, mode, grammars and Follower(grammars),
            Follower(Processors(functions or {})), slots=model.adapters,
        )  # fmt: skip
        self.kv = KVCache(model.spec, blocks, block_size, dtype, device)
        self.runner = Runner(model, self.state, self.kv, max_tokens)
        self.free = list(range(blocks))[::-1]
        self.tables, self.lengths, self.done = {}, {}, {}
        self.queue = {}
        self.step = 0
        self.result = None  # of the last step
        self.drawn_elsewhere = False  # a process whose results say nothing

    def admit(self, row, ids, params=GREEDY, seed=0, table=(), done=0, prompt_len=None, slot=-1, **more):
        """Queue a sequence; the first ``done`` tokens are already in the blocks of ``table``. ``slot``: of its adapter.
        ``more`` is of Generate and of Admit."""
        told = {name: more.pop(name) for name in ("prompt_logprobs_from",) if name in more}
        work = with_adapter(Generate(params, seed, **more), None, slot)
        admit = Admit(row, row, 0, i32(ids), prompt_len or len(ids), work, **told)
        self.queue.setdefault("admits", []).append(admit)
        self.tables[row], self.lengths[row], self.done[row] = [], len(ids), done
        for block in table:
            self.set_block(row, len(self.tables[row]), block)

    def drop(self, row, free=True):
        self.queue.setdefault("drops", []).append(row)
        if free:
            self.free += self.tables[row]
        for books in (self.tables, self.lengths, self.done):
            del books[row]

    def fork(self, src, dst, seed=0):
        """Queue a fork that shares every block of ``src``."""
        for name, value in (("fork_src", src), ("fork_dst", dst), ("fork_seeds", seed)):
            self.queue.setdefault(name, []).append(value)

    def append(self, row, token):
        """Queue a token that the scheduler chose."""
        self.queue.setdefault("append_rows", []).append(row)
        self.queue.setdefault("append_tokens", []).append(token)
        self.lengths[row] += 1

    def copy_block(self, row, slot):
        """Give ``row`` its own copy of a shared block."""
        old, new = self.tables[row][slot], self.free.pop()
        self.queue.setdefault("copy_src", []).append(old)
        self.queue.setdefault("copy_dst", []).append(new)
        self.set_block(row, slot, new)

    def set_block(self, row, slot, block):
        if slot == len(self.tables[row]):
            self.tables[row].append(block)
        self.tables[row][slot] = block
        for name, value in (("delta_rows", row), ("delta_slots", slot), ("delta_blocks", block)):
            self.queue.setdefault(name, []).append(value)

    def run(self, *chunks, samples=None):
        """Run ``chunks`` of (row, tokens), the next tokens of each row; sample all that end, or ``samples`` of
        (index of chunk, row). Returns {row: token}."""
        chunks = sorted(chunks, key=lambda chunk: chunk[1] != 1)
        for row, count in chunks:
            while len(self.tables[row]) * self.block_size < self.done[row] + count:
                self.set_block(row, len(self.tables[row]), self.free.pop())
        starts = [self.done[row] for row, _ in chunks]
        for row, count in chunks:
            self.done[row] += count
        if samples is None:
            samples = [(i, row) for i, (row, _) in enumerate(chunks) if self.done[row] == self.lengths[row]]
        self.queue.update(
            rows=[row for row, _ in chunks], starts=starts, counts=[count for _, count in chunks],
            sample_src=[src for src, _ in samples], sample_rows=[row for _, row in samples],
        )  # fmt: skip
        tokens = self.send()
        for _, row in samples:
            self.lengths[row] += int(self.state.grows[row])
        return dict(zip((row for _, row in samples), tokens, strict=not self.drawn_elsewhere))

    def send(self):
        self.step += 1
        queued, self.queue = self.queue, {}
        self.result = self.runner.launch(plan(self.step, **queued)).result(LEASE, self.step)
        return from_i32(self.result.tokens)

    def generate(self, row, ids, count, chunk=64, **kwargs):
        """Admit, prefill in chunks, decode: the ``count`` new tokens."""
        self.admit(row, ids, **kwargs)
        out = []
        while len(out) < count:
            out += self.run((row, min(chunk, self.lengths[row] - self.done[row]))).values()
        return out


def plan(step, lease=None, admits=(), fork_seeds=(), **columns):
    """A StepPlan of lists."""
    return StepPlan(
        lease or LEASE, step, admits=list(admits), fork_seeds=u64(fork_seeds),
        **{name: i32(values) for name, values in columns.items()},
    )  # fmt: skip


def toy_logits(model, ids):
    """Logits [len(ids), vocab] of one whole pass, in one big block."""
    kv = KVCache(model.spec, 1, 512, torch.float32, CPU)
    length = len(ids)
    batch = SimpleNamespace(
        outputs=None,
        token_ids=torch.tensor(ids), positions=torch.arange(length), slots=torch.arange(length),
        query_starts=torch.tensor([0, length]), context_lens=torch.tensor([length]),
        block_tables=torch.zeros(1, 1, dtype=torch.int32), block_size=512,
    )  # fmt: skip
    return model.logits(model.forward(batch, kv))


def oracle(model, ids, count):
    """Greedy tokens of the toy by computing everything anew at each step."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(toy_logits(model, ids)[-1].argmax()))
    return ids[-count:]


def unpack(logprobs, k):
    """[(ids, values, rank)] of a Logprobs of tokens with k others each."""
    ids, values = from_i32(logprobs.ids), from_f32(logprobs.values)
    assert len(ids) == len(values)
    cut = range(0, len(ids), k + 1)
    ranks = from_i32(logprobs.ranks)
    return [(ids[i : i + k + 1], values[i : i + k + 1], rank) for i, rank in zip(cut, ranks, strict=True)]


def told(logits, token, k):
    """(ids, values, rank) as they must be: the token itself, then the k best."""
    values = torch.log_softmax(logits.double(), -1)
    best = values.topk(k)
    rank = 1 + int((logits > logits[token]).sum())
    return [token, *best.indices.tolist()], [float(values[token]), *best.values.tolist()], rank


def prompts(count, low=3, high=30, vocab=VOCAB, seed=1):
    """Random prompts of mixed length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, int(rng.integers(low, high))).tolist() for _ in range(count)]


class Ladder:
    """A toy grammar: each token is one more than the last, the first is the prompt's length, and 40 is its limit."""

    def __init__(self, vocab=VOCAB):
        self.vocab, self.last = vocab, {}

    def admit(self, row, work, prompt_len, ids):
        outputs = ids[prompt_len:].tolist()
        self.last[row] = outputs[-1] if outputs else prompt_len - 1

    def copy(self, src, dst):
        self.last |= dict(zip(dst, [self.last[row] for row in src], strict=True))

    def drop(self, rows):
        for row in rows:
            del self.last[row]

    def advance(self, rows, tokens):
        for row, token in zip(rows, tokens, strict=True):
            assert token == self.last[row] + 1
            self.last[row] = token

    def fill(self, rows):
        mask, failed = np.full((len(rows), -(-self.vocab // 32)), -1, np.int32), []
        for slot, row in enumerate(rows):
            if row not in self.last:
                continue
            if self.last[row] >= 40:
                failed.append((slot, 500, "too high a ladder"))
                continue
            bits = np.zeros(mask.shape[1] * 32, np.uint8)
            bits[self.last[row] + 1] = 1
            mask[slot] = np.packbits(bits, bitorder="little").view(np.int32)
        return mask, failed

    def reset(self):
        self.last.clear()


LADDER = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputsParams(json_object=True))
