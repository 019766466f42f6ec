"""Draft models and heads: what they draft is what plain torch says they would, and what is kept is what the target
draws without them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draft_rig
import numpy as np
import pytest
import tiny_models
import torch
from draft_rig import CPU, HIDDEN, LENGTH, VOCAB, DraftRig
from safetensors.torch import load_file, save_file
from speculation_rig import Driven
from thread_ranks import on_ranks
from tokenizers import Tokenizer

from quire.gpu_worker.kernels.cpu.library import library
from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.speculation.draft_model import DraftModel
from quire.gpu_worker.speculation.eagle import Eagle
from quire.gpu_worker.speculation.heads import load_head, taps_of
from quire.gpu_worker.speculation.loading import Drafting, load_drafting
from quire.gpu_worker.speculation.medusa import Medusa, load_medusa
from quire.gpu_worker.speculation.passes import TorchPasses, passes_of
from quire.gpu_worker.speculation.reach import TOGETHER, Reach
from quire.proto.checkpoint.model_config import demo_model_path, load_model_config
from quire.proto.codec import from_i32
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.messages import SpeculativePlan, StepPlan
from quire.proto.params import SamplingParams
from quire.proto.speculation import speculative_config

pytestmark = pytest.mark.skipif(library() is None, reason="no native CPU kernels: not compiled, or switched off")

GREEDY, RANDOM = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=50, top_p=0.95)
PROMPTS = ([5, 9, 200, 31], list(range(40, 75)), [7, 7, 7, 8, 300, 2, 1, 19, 4])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of four layers."""
    return tiny_models.make("llama", tmp_path_factory.mktemp("target"), 3, num_hidden_layers=4)


def load(folder: Path):
    config = load_model_config(str(folder), LENGTH)
    return load_model(config, torch.float32, CPU), config


def draft_model(rig: DraftRig, model, max_tokens: int = 256, length: int = LENGTH) -> DraftModel:
    kv = KVCache(model.spec, rig.kv.num_blocks, rig.kv.block_size, model.cache_dtype, CPU)
    passes = passes_of(model, kv, rig.state, None, rig.program)
    return DraftModel(rig.state, kv, passes, max_tokens, length)


def head_proposer(rig: DraftRig, head, native: bool = True) -> Eagle:
    kv = KVCache(head.spec, rig.kv.num_blocks, rig.kv.block_size, head.cache_dtype, CPU)
    passes = passes_of(head, kv, rig.state, None, rig.program) if native else TorchPasses(head, kv, rig.state)
    return Eagle(rig.state, kv, head, passes, 4)


def plain(target, params: SamplingParams, count: int) -> list[list[int]]:
    """The tokens of PROMPTS without drafts."""
    rig = DraftRig(target)
    for row, ids in enumerate(PROMPTS):
        rig.admit(row, ids, params, seed=row)
    while rig.state.known[: len(PROMPTS)].min() < max(map(len, PROMPTS)) + count:
        rig.step(list(range(len(PROMPTS))), 0)
    return [rig.tokens(row, len(ids) + count) for row, ids in enumerate(PROMPTS)]


def drafted(rig: DraftRig, params: SamplingParams, count: int, chunk: int = 1000) -> list[list[int]]:
    """The same with the rig's proposer."""
    for row, ids in enumerate(PROMPTS):
        rig.admit(row, ids, params, seed=row, chunk=chunk)
    rows, most = list(range(len(PROMPTS))), 4
    for _ in range(200):
        going = [row for row in rows if rig.state.known[row] < len(PROMPTS[row]) + count]
        if not going:
            break
        rig.step(going, most)
        most = 4 if most == 2 else 2
    return [rig.tokens(row, len(ids) + count) for row, ids in enumerate(PROMPTS)]


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_draft_like_the_target_is_always_right(folder: Path, params: SamplingParams) -> None:
    target, _ = load(folder)
    rig = DraftRig(target)
    rig.proposer = draft_model(rig, target)
    assert drafted(rig, params, 30, chunk=11) == plain(target, params, 30)
    assert rig.right == rig.tried > 50


def test_another_draft_changes_no_token_and_is_right_at_times(folder: Path, tmp_path: Path) -> None:
    target, _ = load(folder)
    # The same weights but for the layers, so that it is of the target's mind now and then.
    other = tiny_models.make("llama", tmp_path / "other", 3, num_hidden_layers=4)
    weights = load_file(other / "model.safetensors")
    for name, tensor in weights.items():
        if "down_proj" in name:
            tensor *= 0.8
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    for params in (GREEDY, RANDOM):
        rig = DraftRig(target)
        rig.proposer = draft_model(rig, load(other)[0])
        assert drafted(rig, params, 40) == plain(target, params, 40)
        assert 0.1 < rig.right / rig.tried < 1


def test_a_draft_that_is_behind_catches_up_a_pass_at_a_time(folder: Path) -> None:
    target, _ = load(folder)
    rig = DraftRig(target)
    rig.proposer = draft_model(rig, target, max_tokens=16)
    rig.admit(0, PROMPTS[1], GREEDY)
    tried = []
    for _ in range(4):
        before = rig.tried
        rig.step([0], 3)
        tried.append(rig.tried - before)
    assert tried == [0, 0, 3, 3] and rig.right == rig.tried  # 35 tokens by 16


def test_a_cached_prefix_brings_the_drafts_keys_along(folder: Path) -> None:
    target, _ = load(folder)
    rig = DraftRig(target)
    rig.proposer = draft_model(rig, target)
    rig.admit(0, PROMPTS[1], GREEDY)
    rig.step([0], 2)
    shared = rig.state.tables_host[0, :4].tolist()  # four blocks of eight
    rig.admit(1, PROMPTS[1][:34], GREEDY, cached=shared)
    rig.step([1], 2)
    assert rig.proposer.reach.computed[1] >= 32 and rig.right == rig.tried == 4
    # Blocks that get other content hold nothing any more, whoever had them before.
    assert not rig.proposer.reach._filled[rig.state.tables_host[1, 4]]
    rig.proposer.reach.written(shared)
    rig.admit(2, PROMPTS[1], GREEDY, cached=shared)
    assert rig.proposer.reach.computed[2] == 0  # nothing is known of them: all is computed again
    rig.step([2], 2)
    assert rig.right == rig.tried == 6


def test_blocks_that_right_drafts_filled_are_brought_along_too(folder: Path) -> None:
    target, _ = load(folder)
    rig = DraftRig(target)
    rig.proposer = draft_model(rig, target)
    rig.admit(0, PROMPTS[1], GREEDY)
    for _ in range(6):
        rig.step([0], 4)
    reach = rig.proposer.reach
    whole, computed = int(reach.computed[0]) // 8, int(reach.computed[0])
    assert whole >= 7 and rig.right == rig.tried == 24
    rig.admit(1, rig.tokens(0, 8 * whole + 1), GREEDY, cached=rig.state.tables_host[0, :whole].tolist())
    assert reach.computed[1] == 8 * whole
    rig.proposer.kept([0], [0], [0])  # of a step in which nobody was drafted for
    assert reach.computed[0] == computed


@pytest.mark.parametrize("count", [1, TOGETHER, TOGETHER + 1])
def test_blocks_that_a_row_was_given_bring_nothing_along_when_another_finds_them(count: int) -> None:
    tables, blocks = np.arange(2 * 70, dtype=np.int32).reshape(2, 70), np.array([1, 3])
    reach = Reach(2, 140, 8)
    reach.admit([0])
    reach.ran([0], [0], tables, blocks)
    reach._filled[:] = True
    for slot in range(1, 1 + count):
        reach.given(np.array([0]), tables[0, slot : slot + 1])
    found = []
    for prefix in ([count, 69], [69, count], [69, 68]):  # those that no row was given hold what they held
        tables[1, :3] = tables[0, [*prefix, 67]]
        reach.admit([1])
        reach.given(np.array([1] * 3), tables[1, :3])
        reach.ran([1], [16], tables, blocks)
        found.append(int(reach.computed[1]))
    assert found == [0, 8, 16]


@pytest.mark.parametrize("one", [True, False])
def test_what_a_head_computes_in_new_blocks_stays(one: bool) -> None:
    tables = np.arange(8, dtype=np.int32).reshape(1, 8)
    reach, row = Reach(1, 8, 8), np.array([0])
    for end in (8, 16, 24):
        reach.given(row, tables[0, end // 8 - 1 : end // 8])
        if one:
            reach.advance(0, end, tables)
        else:
            reach.reached(row, np.array([end]), tables)
    reach._settle()
    assert reach._filled.tolist() == [True] * 3 + [False] * 5


def test_what_a_row_begins_with_is_looked_at_once_and_by_row() -> None:
    tables, blocks = np.arange(12, dtype=np.int32).reshape(3, 4), np.full(3, 2)
    reach = Reach(3, 12, 8)

    def begun(rows: list[int]) -> list[int]:
        reach._filled[:] = True
        reach.ran(rows, [8] * len(rows), tables, blocks)
        return np.flatnonzero(~reach._filled).tolist()

    reach.admit([0, 1, 2])
    assert [begun([0]), begun([0, 1]), begun([0, 1])] == [[1], [5], []] and reach.computed.tolist() == [8, 8, 0]
    reach.fork([2, 1], [1, 0])
    assert (begun([0]), begun([1, 0])) == ([], [5])
    reach.drop([2])
    assert begun([2]) == []


def test_nothing_is_kept_of_rows_that_went_on_without_hidden_states(folder: Path, tmp_path: Path) -> None:
    target, config = load(folder)
    draft_rig.eagle(tmp_path)
    rig = DraftRig(target)
    rig.proposer = eagle = head_proposer(rig, load_head("eagle", str(tmp_path), config, target))
    rows, none = np.arange(2), np.zeros(0, np.int64)
    for row in rows.tolist():
        rig.admit(row, PROMPTS[row], GREEDY)
    starts, hidden = rig.state.known[rows] - 1, torch.zeros(2, HIDDEN)

    def kept(given: torch.Tensor | None) -> list[bool]:
        run = SimpleNamespace(rows=rows, starts=starts, counts=np.ones(2, int), sample_src=none, sample_rows=none)
        eagle.ran(SimpleNamespace(**vars(run), pure_decode=True), given)  # type: ignore[arg-type]
        return (eagle._count[rows] > 0).tolist()

    assert [kept(each) for each in (None, hidden, None, None)] == [[False] * 2, [True] * 2, [False] * 2, [False] * 2]
    eagle.verified([0], [int(starts[0])], [1], hidden[:1])
    assert kept(None) == [False] * 2
    rig.admit(2, PROMPTS[0], GREEDY)
    assert kept(None) == [False] * 2
    eagle.fork([2], [1])
    assert eagle._count[1] > 0 and kept(None) == [False] * 2


def test_drafts_end_at_the_length_of_the_draft(folder: Path) -> None:
    target, _ = load(folder)
    rig = DraftRig(target)
    rig.proposer = draft_model(rig, target, length=len(PROMPTS[1]) + 3)
    rig.admit(0, PROMPTS[1], GREEDY)
    rig.step([0], 4)
    assert rig.tried == 3  # the last is drawn from the last position that it has
    rig.step([0], 4)
    assert rig.tried == 3


def hidden_of(target, ids: list[int], taps: tuple[int, ...] = ()) -> torch.Tensor:
    """Final hidden states of ``ids``, or those before layers ``taps`` side by side."""
    rig = DraftRig(target, taps=taps)
    rig.admit(0, ids, GREEDY)
    one = np.zeros(1, np.int64)
    hidden = rig.program.hidden(one, one, np.array([len(ids)]), np.arange(len(ids)))
    return rig.program.tapped() if taps else hidden


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def expected_drafts(
    method: str, w, target_folder: Path, target, ids: list[int], count: int, gone: slice = slice(0)
) -> list[int]:
    """Greedy drafts after ``ids``, the last of which is not in the cache yet, by the twin. Those hidden states that
    are ``gone`` are zeros."""
    own = weights_of(target_folder)
    embed = own["model.embed_tokens.weight"]
    output = own.get("lm_head.weight", embed)
    hidden = hidden_of(target, ids[:-1], taps_of(method, 4))
    hidden[gone] = 0.0
    if method == "eagle3":
        hidden = hidden @ w["fc.weight"].T
    found = []
    for _ in range(count):
        embedded = embed[torch.tensor([*ids[1:], *found])]
        if method != "eagle3":
            made = getattr(draft_rig, f"{method}_twin")(w, embedded, hidden)[-1]
            found.append(int((made @ output.T).argmax()))
        else:
            made = draft_rig.eagle3_twin(w, embedded, hidden)[-1]
            place = int((draft_rig.norm(made, w["norm.weight"]) @ w["lm_head.weight"].T).argmax())
            found.append(place + int(w["d2t"][place]))
        hidden = torch.cat((hidden, made[None]))
    return found


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_heads_draft_what_their_twins_do(folder: Path, tmp_path: Path, method: str, native: bool) -> None:
    target, config = load(folder)
    w = getattr(draft_rig, method)(tmp_path)
    head = load_head(method, str(tmp_path), config, target)
    rig = DraftRig(target, taps=taps_of(method, 4))
    rig.proposer = head_proposer(rig, head, native)
    for row, ids in enumerate(PROMPTS):
        rig.admit(row, ids, GREEDY, chunk=20)
    for _ in range(5):
        rows = np.arange(len(PROMPTS))
        drafts, found = rig.proposer.propose(rows, np.full(len(rows), 3))
        assert found.tolist() == [3] * len(rows)
        for row in rows.tolist():
            ids = rig.tokens(row, rig.state.known[row])
            assert drafts[row].tolist() == expected_drafts(method, w, folder, target, ids, 3)
        rig.step(rows.tolist(), 3)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_mtp_drafts_what_its_twin_does(tmp_path: Path, native: bool) -> None:
    tiny_models.make("qwen2", tmp_path, 3, num_hidden_layers=4)
    w = draft_rig.mtp(tmp_path)
    target, config = load(tmp_path)
    rig = DraftRig(target)
    rig.proposer = head_proposer(rig, load_head("mtp", None, config, target), native)
    for row, ids in enumerate(PROMPTS):
        rig.admit(row, ids, GREEDY, chunk=20)
    for _ in range(3):
        drafts, _ = rig.proposer.propose(np.arange(3), np.full(3, 2))
        for row in range(3):
            ids = rig.tokens(row, rig.state.known[row])
            assert drafts[row].tolist() == expected_drafts("mtp", w, tmp_path, target, ids, 2)
        rig.step([0, 1, 2], 2)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
def test_heads_change_no_token(folder: Path, tmp_path: Path, method: str) -> None:
    target, config = load(folder)
    getattr(draft_rig, method)(tmp_path)
    for params in (GREEDY, RANDOM):
        rig = DraftRig(target, taps=taps_of(method, 4))
        if method == "medusa":
            rig.proposer = Medusa(rig.state, load_medusa(str(tmp_path), target), target.dtype, HIDDEN)
        else:
            rig.proposer = head_proposer(rig, load_head(method, str(tmp_path), config, target))
        assert drafted(rig, params, 30, chunk=13) == plain(target, params, 30)
        assert rig.tried > 50


def test_medusa_drafts_what_its_heads_say(folder: Path, tmp_path: Path) -> None:
    target, _ = load(folder)
    w = draft_rig.medusa(tmp_path)
    rig = DraftRig(target)
    rig.proposer = Medusa(rig.state, load_medusa(str(tmp_path), target), target.dtype, HIDDEN)
    rig.admit(0, PROMPTS[2], GREEDY)
    for _ in range(4):
        ids = rig.tokens(0, rig.state.known[0])
        hidden = hidden_of(target, ids[:-1])[-1]
        wanted = []
        for head in range(3):
            x = hidden + torch.nn.functional.silu(w[f"{head}.0.linear.weight"] @ hidden + w[f"{head}.0.linear.bias"])
            wanted.append(int((w[f"{head}.1.weight"] @ x).argmax()))
        assert rig.proposer.propose(np.zeros(1, np.int64), np.array([3]))[0].tolist() == [wanted]
        rig.step([0], 3)


def test_hidden_states_that_are_gone_count_as_zeros(folder: Path, tmp_path: Path) -> None:
    """Of a cached prefix that the head has not seen, and of steps of more rows than speculate."""
    target, config = load(folder)
    w = draft_rig.eagle(tmp_path)
    rig = DraftRig(target)
    rig.proposer = head_proposer(rig, load_head("eagle", str(tmp_path), config, target))
    rig.admit(0, PROMPTS[1], GREEDY)
    shared = rig.state.tables_host[0, :4].tolist()
    rig.proposer.reach.written(shared)
    rig.admit(1, PROMPTS[1], GREEDY, cached=shared)
    rig.crowded = True
    for _ in range(5):
        rig.step([1], 0)
    rig.crowded = False
    assert rig.proposer.propose(np.array([1]), np.array([3]))[1].tolist() == [0]  # nothing to go on from
    rig.step([1], 0)
    ids = rig.tokens(1, rig.state.known[1])
    drafts, found = rig.proposer.propose(np.array([1]), np.array([2]))
    gone = slice(len(PROMPTS[1]) + 5)
    assert found.tolist() == [2]
    assert drafts[0].tolist() == expected_drafts("eagle", w, folder, target, ids, 2, gone)


def test_the_quick_way_makes_up_for_hidden_states_that_are_gone(folder: Path, tmp_path: Path) -> None:
    target, config = load(folder)
    w = draft_rig.eagle(tmp_path)
    rig = DraftRig(target)
    rig.proposer = head_proposer(rig, load_head("eagle", str(tmp_path), config, target))
    rig.admit(0, PROMPTS[1], GREEDY)
    rig.crowded = True
    rig.step([0], 0)
    rig.crowded = False
    rig.step([0], 0)
    known = int(rig.state.known[0])
    ids = rig.tokens(0, known)
    rig.grow(0, known + 2)
    assert rig.proposer.draft(rig.state, [0], [2]) == [2]
    drafts = rig.state.tokens_host[0, known : known + 2].tolist()
    assert drafts == expected_drafts("eagle", w, folder, target, ids, 2, slice(34, 36))


def test_steps_without_drafts_are_worked_off(folder: Path, tmp_path: Path) -> None:
    target, config = load(folder)
    w = draft_rig.eagle(tmp_path)
    rig = DraftRig(target)
    rig.proposer = head_proposer(rig, load_head("eagle", str(tmp_path), config, target))
    rig.admit(0, PROMPTS[2], GREEDY)
    for _ in range(37):  # more than it has room to keep
        rig.step([0], 0)
    ids = rig.tokens(0, rig.state.known[0])
    drafts, _ = rig.proposer.propose(np.array([0]), np.array([2]))
    assert drafts[0].tolist() == expected_drafts("eagle", w, folder, target, ids, 2)


# ---------------------------------------------------------------- with the scheduler

REQUESTS: list[dict] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 0},
    {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.0, "n": 3, "logprobs": 1},
    {"temperature": 0.9, "prompt_logprobs": 2, "bad_words": [[7, 8], [9]]},
]


def all_done(driven: Driven) -> Driven:
    """REQUESTS with prompts that have a beginning in common, twice, so that the second finds it in the cache."""
    shared = list(range(20, 60))
    for uid, asked in enumerate([*REQUESTS, *REQUESTS], 1):
        driven.submit(uid, [*shared[: 13 * (uid % 4)], uid, 7 + uid], seed=uid, max_tokens=18 + uid, **asked)
    return driven.run()


def drafting_of(method: str, folder: Path, tmp_path: Path, target, config, drafts: int = 4) -> Drafting:
    if method == "draft_model":
        model = str(folder)  # the target itself
    else:
        getattr(draft_rig, method)(tmp_path)
        model = str(tmp_path)
    text = json.dumps({"method": method, "model": model, "num_speculative_tokens": drafts})
    args = EngineArgs(model=str(folder), speculative_config=text)
    found = load_drafting(speculative_config(args), args, config, target)
    assert found is not None and found.step_bytes(100, 8) > 0
    assert (found.block_bytes(8) > 0) == (method != "medusa")
    return found


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "medusa"])
def test_all_requests_are_as_without_drafts(folder: Path, tmp_path: Path, method: str) -> None:
    """In one batch, with cached prefixes, in chunks, and with preemption."""
    target, config = load(folder)
    plain = all_done(Driven(target, VOCAB, blocks=160))
    drafting = drafting_of(method, folder, tmp_path, target, config, 4 if method != "medusa" else 3)
    for more in ({"blocks": 160}, {"blocks": 26, "adapt": True}, {"budget": 24, "rows": 3, "draft_rows": 3}):
        found = all_done(Driven(target, VOCAB, drafting=drafting, drafts=drafting.config.drafts, **more))
        assert found.outcome() == plain.outcome()
        assert found.core.stats().draft_tokens and (more.get("blocks") != 26 or found.core.preemptions)
        if method == "draft_model" and more == {"blocks": 160}:
            assert found.steps < 0.75 * plain.steps


@pytest.mark.parametrize("drafts", [True, False])
def test_hidden_states_are_kept_where_drafts_are_likely_to_follow(folder: Path, tmp_path: Path, drafts: bool) -> None:
    target, config = load(folder)
    driven = Driven(target, VOCAB, drafting=drafting_of("eagle", folder, tmp_path, target, config))
    driven.replica.draft_worth = worth(drafts)
    given, ran = [], driven.runner.proposer.ran
    driven.runner.proposer.ran = lambda run, hidden: (given.append(hidden is not None), ran(run, hidden))
    driven.submit(1, PROMPTS[1], max_tokens=9, temperature=0.0)
    driven.run()
    assert given and given[0] is drafts and any(given) is drafts


def test_what_drafts_is_told_once_of_rows_that_go_on_without_it(folder: Path, tmp_path: Path) -> None:
    """A row with a new owner is another one, although its steps look the same."""
    target, config = load(folder)
    driven = Driven(target, VOCAB, drafting=drafting_of("eagle", folder, tmp_path, target, config))
    driven.replica.draft_worth = worth(False)
    told, ran = [], driven.runner.proposer.ran
    driven.runner.proposer.ran = lambda run, hidden: (told.append(run.starts.tolist()), ran(run, hidden))
    for uid in (1, 2):
        driven.submit(uid, [uid], max_tokens=9, temperature=0.0)
        driven.run()
    assert told == [[0], [0]] and driven.steps == 18
    # Nor is it told again of those that are left when others end.
    for uid in (3, 4, 5):
        driven.submit(uid, [uid], max_tokens=3 * uid, temperature=0.0)
    driven.run()
    assert told[2:] == [[0, 0, 0]]


def test_blocks_that_go_to_a_row_that_is_not_drafted_for_hold_nothing_of_a_head_s(folder: Path, tmp_path: Path) -> None:
    target, config = load(folder)
    driven = Driven(target, VOCAB, blocks=8, drafting=drafting_of("eagle", folder, tmp_path, target, config))
    reach, tables = driven.runner.proposer.reach, driven.state.tables_host
    filled = []
    for uid, drafts in ((1, True), (2, False)):
        driven.replica.draft_worth = worth(drafts)
        driven.submit(uid, [uid] * 9, max_tokens=44, temperature=0.0)
        driven.run()
        reach._settle()
        filled.append(int(reach._filled[tables[0, :6]].sum()))
    assert filled[0] >= 5 and filled[1] == 0


def test_hidden_states_are_gone_each_time_that_a_row_goes_on_without_drafts(folder: Path, tmp_path: Path) -> None:
    target, config = load(folder)
    driven = Driven(target, VOCAB, drafting=drafting_of("eagle", folder, tmp_path, target, config))
    launch, kept = driven.runner.launch, {True: [], False: []}

    def watched(plan: StepPlan) -> Any:
        outcome, drafts = launch(plan), driven.steps & 8 == 0
        kept[isinstance(plan, SpeculativePlan)].append(bool(driven.runner.proposer._count[0]))
        driven.replica.draft_worth = worth(drafts)
        return outcome

    driven.runner.launch = watched
    driven.submit(1, PROMPTS[1], max_tokens=60, temperature=0.0)
    driven.run()
    assert all(kept[True]) and not any(kept[False]) and min(map(len, kept.values())) > 8


def test_a_head_has_its_own_copies_of_blocks_that_children_part_at(folder: Path, tmp_path: Path) -> None:
    target, config = load(folder)
    driven = Driven(target, VOCAB, drafting=drafting_of("eagle", folder, tmp_path, target, config))
    pages, copied, parted = driven.runner.proposer.kv, [], []
    copy, launch = pages.copy_blocks, driven.runner.launch
    pages.copy_blocks = lambda src, dst: (copied.extend(zip(src.tolist(), dst.tolist(), strict=True)), copy(src, dst))

    def watched(plan: StepPlan) -> Any:
        parted.extend(zip(from_i32(plan.copy_src), from_i32(plan.copy_dst), strict=True))
        return launch(plan)

    driven.runner.launch = watched
    driven.submit(1, PROMPTS[1], max_tokens=9, n=3)
    driven.run()
    assert len(parted) == 2 and copied == parted


def worth(drafts: bool) -> Any:
    """Drafts are, or are not."""
    return SimpleNamespace(drafts=lambda rows: drafts, planned=lambda rows, first: drafts, ended=lambda *_: None)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "eagle3", "medusa"])
def test_ranks_that_share_a_model_keep_the_same_drafts(folder: Path, tmp_path: Path, method: str) -> None:
    """Each in a scheduler's hands of its own, so that ranks in different places would plan and exchange differently."""
    config = load_model_config(str(folder), 256)
    if method not in ("ngram", "draft_model"):
        getattr(draft_rig, method)(tmp_path)
    model = {"ngram": None, "draft_model": str(folder)}.get(method, str(tmp_path))
    values = {"method": method, "model": model, "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adapt": False}
    args = EngineArgs(model=str(folder), tensor_parallel_size=2, speculative_config=json.dumps(values))
    said = speculative_config(args)

    def work(group: Any, spec: Any = said) -> Driven:
        target = load_model(config, torch.float32, CPU, group=group)
        drafting = None if spec is None else load_drafting(spec, args, config, target)
        driven = Driven(target, VOCAB, config=spec, drafting=drafting, draft_rows=4, functions={"no": refuse_a_token})
        for uid, asked in enumerate(SHARED, 1):
            driven.submit(uid, [*range(20, 20 + 9 * uid), 7 + uid], seed=uid, max_tokens=20, **asked)
        return driven.run()

    plain, ranks = work(None, None), on_ranks(2, work)
    assert [each.tokens for each in ranks] == [plain.tokens] * 2
    assert ranks[0].outcome()[2:] == plain.outcome()[2:] and len(plain.failed) == 1
    assert ranks[0].core.stats().draft_tokens > 20


def refuse_a_token(prompt: Any, ids: Any, logits: torch.Tensor, extra: Any) -> torch.Tensor:
    """A user's function that fails once there are twelve outputs."""
    if len(ids) >= 12:
        raise ValueError("enough")
    return logits


SHARED: list[dict] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.8, "repetition_penalty": 1.3, "top_k": 40},
    {"temperature": 0.7, "logits_processors": ["no"]},
]


@pytest.mark.parametrize(("method", "share"), [("draft_model", 0.45), ("eagle", 0.75)])
def test_the_demo_models_own_drafts_are_of_use(method: str, share: float) -> None:
    demo = Path(demo_model_path())
    config = load_model_config(str(demo), 256)
    target = load_model(config, torch.float32, CPU)
    folder = demo / method.removesuffix("_model")
    text = json.dumps({"method": method, "model": str(folder), "num_speculative_tokens": 4})
    args = EngineArgs(speculative_config=text)
    drafting = load_drafting(speculative_config(args), args, config, target)
    # "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n" and the like
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    runs = []
    for each in (None, drafting):
        driven = Driven(target, config.vocab_size, drafting=each)
        for uid, said in enumerate(("Tell me a story about a fox.", "Count to 12.", "Tell me a joke."), 1):
            ids = tokenizer.encode(f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n").ids
            driven.submit(uid, ids, seed=uid, eos=(2,), max_tokens=80, temperature=float(uid > 1))
        runs.append(driven.run())
    assert runs[1].outcome() == runs[0].outcome()
    assert runs[1].steps < share * runs[0].steps


# ---------------------------------------------------------------- folders


def test_a_draft_model_with_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    target, config = load(folder)
    text = json.dumps({"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2})
    args = EngineArgs(model=str(folder), speculative_config=text)
    tiny_models.make("llama", tmp_path, 1, vocab_size=VOCAB + 8)
    with pytest.raises(ConfigError, match=rf"has {VOCAB + 8} tokens, the target's {VOCAB}"):
        load_drafting(speculative_config(args), args, config, target)
    tiny_models.make("llama", tmp_path, 1)
    assert load_drafting(speculative_config(args), args, config, target) is not None
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    first, second = list(tokenizer["model"]["vocab"])[:2]
    vocab = tokenizer["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="a draft model must have the target's tokenizer"):
        load_drafting(speculative_config(args), args, config, target)


def test_what_does_not_fit_a_method_is_refused(folder: Path, tmp_path: Path) -> None:
    target, config = load(folder)

    def refused(said: str, **values) -> None:
        args = EngineArgs(model=str(folder), speculative_config=json.dumps({"num_speculative_tokens": 4, **values}))
        with pytest.raises(ConfigError, match=said):
            load_drafting(speculative_config(args), args, config, target)

    draft_rig.medusa(tmp_path)
    refused("num_speculative_tokens 4 is more than the 3 heads", method="medusa", model=str(tmp_path))
    refused("method 'mtp' is for MiMoForCausalLM", method="mtp")
    refused("does not exist", method="draft_model", model="/nowhere/at/all")
    (tmp_path / "config.json").write_text("{}")
    refused(r"config.json: medusa_num_heads must be a positive integer", method="medusa", model=str(tmp_path))


def damage(folder: Path, how: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if how == "shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    elif how == "missing":
        del tensors[next(name for name in tensors if "o_proj" in name)]
    elif how == "more":
        tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(2, 2)
    elif how == "d2t":
        tensors["d2t"] = tensors["d2t"] + 10_000
    elif how == "quantized":
        tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        save_file(tensors, file)


@pytest.mark.parametrize(
    ("method", "how", "said"),
    [
        ("eagle", "shape", r"model.safetensors: fc.weight has shape \(48, 95\) where config.json makes it \(48, 96\)"),
        ("eagle", "missing", r"lack layers.0.self_attn.o_proj.weight"),
        ("eagle", "more", r"hold layers.1.mlp.up_proj.weight, which this head has no place for"),
        ("eagle", "quantized", r"model.safetensors: fc.weight is int8"),
        ("eagle", "cut", r"model.safetensors is cut short"),
        ("eagle3", "missing", r"lack midlayer.self_attn.o_proj.weight"),
        ("eagle3", "d2t", r"d2t holds ids from"),
    ],
)
def test_damaged_heads_are_refused_by_file_and_tensor(
    folder: Path, tmp_path: Path, method: str, how: str, said: str
) -> None:
    target, config = load(folder)
    getattr(draft_rig, method)(tmp_path)
    damage(tmp_path, how)
    with pytest.raises(ConfigError, match=said):
        load_head(method, str(tmp_path), config, target)


def test_a_head_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    target, config = load(folder)
    draft_rig.eagle(tmp_path)
    for key, value, said in (
        ("hidden_size", 64, "hidden_size 64 is not the target's 48"),
        ("num_hidden_layers", 2, "num_hidden_layers 2 is not supported"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(draft_rig.CONFIG | {key: value}))
        with pytest.raises(ConfigError, match=said):
            load_head("eagle", str(tmp_path), config, target)
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_head("eagle", str(tmp_path / "nowhere"), config, target)


def test_pickled_heads_with_an_embedding_are_read(folder: Path, tmp_path: Path) -> None:
    target, config = load(folder)
    w = draft_rig.eagle(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    embed = weights_of(folder)["model.embed_tokens.weight"]
    torch.save(w | {"embed_tokens.weight": embed}, tmp_path / "pytorch_model.bin")
    assert load_head("eagle", str(tmp_path), config, target).embed is target.embed
    torch.save(w | {"embed_tokens.weight": embed + 1}, tmp_path / "pytorch_model.bin")
    assert load_head("eagle", str(tmp_path), config, target).embed is not target.embed


def test_vocabulary_is_a_heads_own(folder: Path, tmp_path: Path) -> None:
    target, config = load(folder)
    w = draft_rig.eagle3(tmp_path, own=50)
    head = load_head("eagle3", str(tmp_path), config, target)
    logits = head.logits(torch.randn(2, HIDDEN))
    known = (torch.arange(50) + w["d2t"]).tolist()
    assert logits.shape == (2, VOCAB)
    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == known
