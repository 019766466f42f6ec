"""What comes into the scheduler and what goes out, as lines to read: the same from run to run.

``> w0: …`` is what w0 sent, ``< w0: …`` what it is sent, ``! …`` what happened to connections, ``@ …`` how many
seconds have passed since the first line. A sequence is ``uid.index``; a row is named by the sequence that holds it.
Tests (``tests/scheduler/transcripts``) and ``quire replay`` print them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import msgspec

from ..proto.codec import from_i8, from_i32, from_i64, from_u64
from ..proto.messages import (
    Admit,
    Assign,
    Finish,
    GetView,
    Heartbeat,
    Peers,
    Reconcile,
    SpeculativePlan,
    StepPlan,
    StepResult,
    Submit,
    TokenBatch,
    View,
)
from ..proto.work import Generate, child_seed
from .inputs import Inputs, Outgoing
from .membership import Membership
from .request import Sequence


class Rows:
    """Which sequence holds which row of one worker, as its plans say."""

    def __init__(self, sequences: Iterable[Sequence] = ()):
        self._held: dict[int, tuple[int, int, int, bool]] = {}  # uid, index, seed, whether it is a beam
        for seq in sequences:
            for row in seq.holdings().rows:
                self._held[row] = seq.uid, seq.index, seq.seed(), seq.width > 1

    def __getitem__(self, row: int) -> str:
        if row not in self._held:
            return f"row {row}"
        uid, index, _, beam = self._held[row]
        return f"{uid}.{index}" + (f" (row {row})" if beam else "")

    def apply(self, plan: StepPlan) -> list[str]:
        """Follow a plan; its lines, in the order in which a worker applies them."""
        lines = []
        if drops := from_i32(plan.drops):
            lines.append("drop " + ", ".join(map(self.__getitem__, drops)))
        for row in drops:
            self._held.pop(row, None)
        lines += self._forks(plan)
        copies = zip(from_i32(plan.copy_src), from_i32(plan.copy_dst), strict=True)
        lines += [f"copy block {src} to {dst}" for src, dst in copies]
        table = _tables(plan)
        for admit in plan.admits:
            work, seed, beams = admit.work, 0, False
            if isinstance(work, Generate):
                seed, beams = child_seed(work.seed, admit.index), work.params.use_beam_search
            self._held[admit.row] = admit.uid, admit.index, seed, beams
            lines.append(_admit(admit, self[admit.row], table.pop(admit.row, "none")))
        lines += [f"block {blocks} for {self[row]}" for row, blocks in table.items()]
        pairs = zip(from_i32(plan.append_rows), from_i32(plan.append_tokens), strict=True)
        lines += [f"append {token} to {self[row]}" for row, token in pairs]
        return lines + self._run(plan)

    def _forks(self, plan: StepPlan) -> list[str]:
        """Rows that begin as copies: of a sibling, whose index its seed tells, or of a beam of the same search."""
        lines, made = [], {}
        seeds = from_u64(plan.fork_seeds)
        for src, dst, seed in zip(from_i32(plan.fork_src), from_i32(plan.fork_dst), seeds, strict=True):
            uid, index, its, beam = self._held.get(src, (-1, 0, seed, True))
            made[dst] = uid, (index + seed - its) % 2**64, seed, beam
            lines.append((f"fork {self[src]} into row {dst}", dst))
        self._held |= made
        return [line + ("" if made[dst][3] else f" for {self[dst]}") for line, dst in lines]

    def _run(self, plan: StepPlan) -> list[str]:
        """Compute rows, and who draws from their logits."""
        draws: dict[int, list[str]] = {}
        for at, row in zip(from_i32(plan.sample_src), from_i32(plan.sample_rows), strict=True):
            draws.setdefault(at, []).append(self[row])
        decodes, lines = [], []
        speculate = set(from_i32(plan.draft_rows)) if isinstance(plan, SpeculativePlan) else set()
        columns = zip(from_i32(plan.rows), from_i32(plan.starts), from_i32(plan.counts), strict=True)
        for at, (row, start, count) in enumerate(columns):
            name, drawn = self[row], draws.get(at, [])
            if at in speculate:
                lines.append(f"verify {name} from {start} to {start + count}")
                continue
            if count == 1 and drawn == [name]:
                decodes.append(f"{name} at {start}")
                continue
            then = f", draw for {' '.join(drawn)}" if drawn else ""
            lines.append(f"prefill {name} {start}..{start + count}{then}")
        return [*(["decode " + ", ".join(decodes)] if decodes else []), *lines]


class Transcript(Inputs):
    """Inputs that are written down. ``lines`` gathers what happened, ``take`` hands it over.

    Heartbeats are left out, and so are ``Peers`` that nobody needs in order to follow. ``ids`` False: token ids mean
    nothing and are left out too. ``began`` is the time that counts as 0, now by default.
    """

    def __init__(self, membership: Membership, ids: bool = True, began: float | None = None):
        super().__init__(membership)
        self._ids = ids
        self.lines: list[str] = []
        replicas = self.core.replicas.values()
        self._rows = {replica.peer: Rows(replica.sequences()) for replica in replicas}
        self._said = self.core.clock()
        self.began = self._said if began is None else began

    def take(self) -> list[str]:
        """The lines since the last call."""
        lines, self.lines = self.lines, []
        return lines

    def worker(self, peer: str, message: Any) -> None:
        self._say("> " + peer, message)
        super().worker(peer, message)

    def front(self, peer: str, message: Any) -> None:
        self._say("> " + peer, message)
        super().front(peer, message)

    def worker_gone(self, peer: str, why: str, unsent: int = 0) -> None:
        self._line(f"! {peer} {why}" + (f"; of its plans {unsent} never left" if unsent else ""))
        super().worker_gone(peer, why, unsent)

    def front_gone(self, peer: str) -> None:
        self._line(f"! {peer} is gone: its connection broke")
        super().front_gone(peer)

    def undelivered(self, peer: str, message: Any) -> None:
        self._line(f"! {type(message).__name__} did not reach {peer}")
        super().undelivered(peer, message)

    def to_workers(self) -> Outgoing:
        out = super().to_workers()
        for peer, message in out:
            if isinstance(message, Assign):
                self._rows[peer] = Rows()
            self._say("< " + peer, message, self._rows.get(peer))
        return out

    def to_front(self) -> Outgoing:
        out = super().to_front()
        for peer, message in out:
            self._say("< " + peer, message)
        return out

    def _say(self, who: str, message: Any, rows: Rows | None = None) -> None:
        if not isinstance(message, Heartbeat | Peers | Reconcile | GetView | View):
            first, *rest = describe(message, rows, self._ids)
            self._line(f"{who}: {first}")
            self.lines += [f"    {line}" for line in rest]

    def _line(self, line: str) -> None:
        now = self.core.clock()
        if f"{now - self.began:.3f}" != f"{self._said - self.began:.3f}":
            self._said = now
            self.lines.append(f"@ {now - self.began:.3f} s")
        self.lines.append(line)


def describe(message: Any, rows: Rows | None = None, ids: bool = True) -> list[str]:
    """A message in words: one line, and for a plan one more for each thing it asks for."""
    if isinstance(message, StepPlan):
        return [f"step {message.step} of lease {message.lease.counter}", *(rows or Rows()).apply(message)]
    if isinstance(message, StepResult):
        return [_result(message, ids)]
    if isinstance(message, TokenBatch):
        return [_tokens(message, ids)]
    if isinstance(message, Submit):
        return [_submit(message)]
    return [_plain(message)]


def _submit(message: Submit) -> str:
    text = f"submit {message.uid}: {len(message.ids) // 4} prompt tokens"
    if message.children:
        text += ", resumed " + " ".join(f"{c.index}+{len(c.ids) // 4}" for c in message.children)
    for name in ("attempt", "priority", "losses", "key"):
        if value := getattr(message, name):
            text += f", {name} {value}"
    return text + "".join(f", {part}" for part in _values(message.work, ("params",)))


def _result(message: StepResult, ids: bool) -> str:
    text = f"result of step {message.step} of lease {message.lease.counter}"
    tokens = from_i32(message.tokens)
    drawn = " ".join(map(str, tokens)) if ids else f"{len(tokens)} tokens"
    if message.counts:
        drawn += f" ({' '.join(map(str, from_i32(message.counts)))} by slot)"
    text += f": drawn {drawn}" if tokens else ": nothing drawn"
    if message.logprobs:
        text += f", logprobs of slots {' '.join(map(str, from_i32(message.logprob_slots)))}"
    text += "".join(f", prompt logprobs from {p.start}" for p in message.prompts)
    text += "".join(f", slot {f.slot} failed with {f.status}: {f.message}" for f in message.failed)
    return text + "".join(f", slot {p.slot} pooled {len(p.data)} bytes" for p in message.pooled)


def _tokens(message: TokenBatch, ids: bool) -> str:
    tokens, at, parts = from_i32(message.tokens), 0, []
    started = zip(from_i64(message.started_uids), from_i32(message.started_cached), strict=True)
    parts = [f"{uid} starts" + (f" with {cached} tokens cached" if cached else "") for uid, cached in started]
    for uid, index, offset, count, finish, stop in zip(
        from_i64(message.uids), from_i32(message.indexes), from_i32(message.offsets), from_i32(message.counts),
        from_i8(message.finishes), from_i32(message.stop_ids), strict=True,
    ):  # fmt: skip
        new, at = tokens[at : at + count], at + count
        what = f"is {' '.join(map(str, new))}" if ids else f"of {count}" if count > 1 else ""
        text = f"{uid}.{index}" + (f" token {offset} {what}".rstrip() if new else "")
        if finish:
            text += f", ended: {Finish(finish).name.lower()}" + (f" by {stop}" if stop >= 0 and ids else "")
        parts.append(text)
    return "; ".join(parts) or "no tokens"


def _admit(admit: Admit, name: str, blocks: str) -> str:
    count = len(admit.ids) // 4
    outputs = f" and {count - admit.prompt_len} of output" if count > admit.prompt_len else ""
    row = "" if name.endswith(")") else f" in row {admit.row}"
    adapter = f", adapter of slot {admit.adapter_slot}" if admit.adapter_slot >= 0 else ""
    return f"admit {name}{row}: {admit.prompt_len} prompt tokens{outputs}, blocks {blocks}{adapter}"


def _tables(plan: StepPlan) -> dict[int, str]:
    """Block table entries that are set, by row."""
    columns = zip(from_i32(plan.delta_rows), from_i32(plan.delta_slots), from_i32(plan.delta_blocks), strict=True)
    return {row: " ".join(str(block) for _, _, block in entries) for row, entries in groupby(columns, lambda c: c[0])}


def _plain(message: Any) -> str:
    """Any message: its name in words, and the fields that say something."""
    name = type(message).__name__
    words = "".join(" " + c.lower() if c.isupper() else c for c in name).strip()
    parts = _values(message, tuple(message.__struct_fields__))
    return words + (": " + ", ".join(parts) if parts else "")


def _values(message: Any, names: tuple[str, ...]) -> list[str]:
    """Fields that are not their defaults, as ``name value``; columns by their size, nothing that differs by machine."""
    parts = []
    defaults = dict(zip(reversed(message.__struct_fields__), reversed(message.__struct_defaults__), strict=False))
    for name in names:
        value = getattr(message, name, None)
        if name in ("pid", "incarnation", "protocol", "epoch", "memory") or value is None:
            continue
        if isinstance(value, msgspec.Struct):
            parts += _values(value, tuple(value.__struct_fields__))
        elif isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
            parts += ["(" + ", ".join(_values(item, tuple(item.__struct_fields__))) + ")" for item in value]
        elif value != defaults.get(name) and value not in ([], "", b""):
            parts.append(f"{name} {f'of {len(value)} bytes' if isinstance(value, bytes) else value}")
    return parts
