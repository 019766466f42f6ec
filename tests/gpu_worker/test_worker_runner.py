"""The runner, driven by hand-written plans over a toy model whose logits show any wrong block, row or position."""

import numpy as np
import pytest
import torch
from worker_toys import CPU, GREEDY, VOCAB, Hand, ToyModel, oracle, plan, prompts

from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.state import PlanError
from quire.gpu_worker.transfer import Upload, pack, packed_size, unpack
from quire.proto.codec import i32
from quire.proto.messages import Admit, StepPlan
from quire.proto.params import SamplingParams
from quire.proto.work import Generate

torch.set_num_threads(1)
RANDOM = SamplingParams(temperature=1.0)
MODEL = ToyModel()


def test_a_batch_of_prompts_matches_the_oracle():
    hand = Hand(MODEL, rows=8, blocks=64)
    asked = prompts(8)
    for row, ids in enumerate(asked):
        hand.admit(row, ids)
    got = {row: [] for row in range(8)}
    for row, token in hand.run(*[(row, len(ids)) for row, ids in enumerate(asked[:3])]).items():
        got[row].append(token)
    # The rest are prefilled while the first decode: mixed steps, decodes first.
    for row in range(3, 8):
        for at, token in hand.run((row, len(asked[row])), *[(r, 1) for r in range(row)]).items():
            got[at].append(token)
        assert MODEL.batches[-1].num_decodes == row
    for row, ids in enumerate(asked):
        assert got[row] == oracle(MODEL, ids, len(got[row])), row


@pytest.mark.parametrize("chunk", [1, 5, 8])
def test_chunked_prefill_equals_whole(chunk):
    ids = prompts(1, 29, 30)[0]
    assert Hand(MODEL).generate(3, ids, 6, chunk=chunk) == oracle(MODEL, ids, 6)


def test_a_step_without_samples_returns_no_tokens():
    hand = Hand(MODEL)
    hand.admit(0, list(range(20)))
    assert hand.run((0, 7)) == {}
    assert hand.send() == []  # an empty plan is a step too


def test_fork_shares_blocks_and_copies_on_write():
    """Three children of one prompt draw from one row of logits, then write apart from the shared partial block."""
    ids = prompts(1, 13, 14)[0]
    params, seeds = SamplingParams(temperature=1.0, n=3), [5, 6, 7]
    alone = [Hand(MODEL).generate(0, ids, 5, params=params, seed=seed) for seed in seeds]
    assert len({tuple(tokens) for tokens in alone}) == 3

    hand = Hand(MODEL)
    hand.admit(0, ids, params=params, seed=5)
    hand.run((0, 10))
    hand.set_block(0, 1, hand.tables[0][1])  # to the same block: harmless
    for child in (1, 2):
        hand.fork(0, child, seeds[child])
        hand.lengths[child] = len(ids)
    got = {row: [token] for row, token in hand.run((0, 3), samples=[(0, 0), (0, 1), (0, 2)]).items()}
    for child in (1, 2):
        hand.tables[child], hand.done[child] = [*hand.tables[0]], len(ids)
        hand.copy_block(child, 1)
    while len(got[0]) < 5:
        for row, token in hand.run((0, 1), (1, 1), (2, 1)).items():
            got[row].append(token)
    assert [got[row] for row in range(3)] == alone


def test_forks_that_permute_rows_read_all_sources_first():
    asked = prompts(3, 9, 20)
    hand = Hand(MODEL)
    for row, ids in enumerate(asked):
        hand.admit(row, ids)
    first = hand.run(*[(row, len(ids)) for row, ids in enumerate(asked)])
    for src, dst in ((0, 1), (1, 2), (2, 0)):
        hand.fork(src, dst)
    for books in (hand.tables, hand.lengths, hand.done):
        books[1], books[2], books[0] = books[0], books[1], books[2]
    second = hand.run((0, 1), (1, 1), (2, 1))
    for src, dst in ((0, 1), (1, 2), (2, 0)):
        assert [first[src], second[dst]] == oracle(MODEL, asked[src], 2)


def test_block_copies_are_gathered_before_they_are_written():
    kv = KVCache(MODEL.spec, 4, 8, torch.float32, CPU)
    for block in range(4):
        for tensor in (*kv.k, *kv.v):
            tensor[block] = block
    kv.copy_blocks(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]))
    assert all(t[:, 0, 0, 0].tolist() == [2, 0, 1, 3] for t in (*kv.k, *kv.v))


def test_blocks_of_a_cached_prefix_are_shared():
    prefix, tails = list(range(16)), ([20, 21, 22], [30, 31])
    hand = Hand(MODEL)
    assert hand.generate(0, prefix + tails[0], 3) == oracle(MODEL, prefix + tails[0], 3)
    shared = hand.tables[0][:2]
    assert hand.generate(1, prefix + tails[1], 3, table=shared, done=16) == oracle(MODEL, prefix + tails[1], 3)
    assert MODEL.batches[-6].token_ids.tolist() == tails[1]


def test_rows_and_blocks_are_used_again():
    hand = Hand(MODEL, rows=2, blocks=8)
    for number, ids in enumerate(prompts(6, 5, 30)):
        row = number % 2
        assert hand.generate(row, ids, 4) == oracle(MODEL, ids, 4)
        hand.drop(row)
    assert sorted(hand.free) == list(range(8))


def test_an_admit_over_a_row_replaces_it():
    hand = Hand(MODEL)
    hand.generate(0, list(range(30)), 2)
    ids = [4, 5, 6]
    assert hand.generate(0, ids, 3) == oracle(MODEL, ids, 3)


def test_a_seed_draws_the_same_alone_and_in_a_batch():
    asked = prompts(8)
    filters = [RANDOM, SamplingParams(top_k=5), SamplingParams(top_p=0.7), SamplingParams(temperature=0.7, min_p=0.1)]
    alone = [
        Hand(MODEL).generate(2, ids, 5, params=filters[i % 4], seed=2**63 + i, chunk=4) for i, ids in enumerate(asked)
    ]
    hand = Hand(MODEL, max_tokens=256)
    for row, ids in enumerate(asked):
        hand.admit(row, ids, params=filters[row % 4], seed=2**63 + row)
    got = [[] for _ in asked]
    hand.run(*[(row, 2) for row in range(8)])
    for _ in range(5):
        for row, token in hand.run(*[(r, hand.lengths[r] - hand.done[r]) for r in range(8)]).items():
            got[row].append(token)
    assert got == alone


def test_resumed_sequences_go_on_as_if_never_interrupted():
    ids, params = prompts(1)[0], SamplingParams(temperature=1.0)
    whole = Hand(MODEL).generate(0, ids, 8, params=params, seed=9)
    assert Hand(MODEL).generate(5, ids + whole[:3], 5, params=params, seed=9) == whole[3:]


def test_a_slot_set_twice_takes_the_later_block():
    hand = Hand(MODEL)
    hand.admit(0, [1, 2, 3], table=[5])
    hand.set_block(0, 0, 7)
    assert hand.run((0, 3)) == {0: oracle(MODEL, [1, 2, 3], 1)[0]}
    assert hand.state.tables[0, 0] == 7


def test_the_longest_sequence_fits():
    hand = Hand(MODEL, length=32)
    ids = list(range(31))
    assert hand.generate(0, ids, 2) == oracle(MODEL, ids, 2)  # the second overruns: it is written past the end
    with pytest.raises(PlanError, match="is not in"):
        hand.run((0, 1))


def _hand():
    hand = Hand(MODEL, rows=4, length=32, blocks=8)
    hand.admit(0, list(range(10)))
    hand.admit(1, list(range(6)))
    hand.run((0, 10), (1, 6))
    return hand


def _run(**changes):
    columns = {"rows": [0], "starts": [10], "counts": [1], "sample_src": [0], "sample_rows": [0], **changes}
    return plan(2, **columns)


BAD = {
    "a drop out of range": plan(2, drops=[4]),
    "a negative drop": plan(2, drops=[-1]),
    "half an item": StepPlan(plan(1).lease, 2, drops=b"\0\0\0"),
    "a fork from nobody": plan(2, fork_src=[3], fork_dst=[2], fork_seeds=[0]),
    "a fork without a seed": plan(2, fork_src=[0], fork_dst=[2]),
    "two forks to one row": plan(2, fork_src=[0, 1], fork_dst=[2, 2], fork_seeds=[0, 0]),
    "a fork out of range": plan(2, fork_src=[0], fork_dst=[9], fork_seeds=[0]),
    "a copy out of range": plan(2, copy_src=[0], copy_dst=[8]),
    "a copy of nothing": plan(2, copy_dst=[1]),
    "two copies to one block": plan(2, copy_src=[0, 1], copy_dst=[2, 2]),
    "an admit out of range": plan(2, admits=[Admit(4, 1, 0, i32([1]), 1, Generate(GREEDY, 0))]),
    "an admit of no ids": plan(2, admits=[Admit(2, 1, 0, b"", 0, Generate(GREEDY, 0))]),
    "too long an admit": plan(2, admits=[Admit(2, 1, 0, i32([1] * 33), 33, Generate(GREEDY, 0))]),
    "an id out of the vocabulary": plan(2, admits=[Admit(2, 1, 0, i32([VOCAB]), 1, Generate(GREEDY, 0))]),
    "a prompt longer than its ids": plan(2, admits=[Admit(2, 1, 0, i32([1]), 2, Generate(GREEDY, 0))]),
    "a block out of range": plan(2, delta_rows=[0], delta_slots=[2], delta_blocks=[8]),
    "a slot out of range": plan(2, delta_rows=[0], delta_slots=[4], delta_blocks=[1]),
    "a hole in a table": plan(2, delta_rows=[0], delta_slots=[3], delta_blocks=[1]),
    "columns of two lengths": plan(2, delta_rows=[0, 0], delta_slots=[2], delta_blocks=[1]),
    "a row of nobody": _run(rows=[2], sample_rows=[2]),
    "a row twice": _run(rows=[0, 0], starts=[10, 10], counts=[1, 1]),
    "tokens not known": _run(starts=[11]),
    "no tokens": _run(counts=[0]),
    "a negative start": _run(starts=[-1]),
    "blocks not set": plan(
        2, admits=[Admit(2, 1, 0, i32([1]), 1, Generate(GREEDY, 0))], rows=[2], starts=[0], counts=[1]
    ),
    "a sample of no row": _run(sample_src=[1]),
    "a sample for nobody": _run(sample_rows=[3]),
    "a sample over a known token": _run(starts=[5]),
    "a sample into another length": _run(sample_rows=[1]),
    "two samples into one row": _run(sample_src=[0, 0], sample_rows=[0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_plan_is_refused(bad):
    with pytest.raises(PlanError):
        _hand().runner.launch(bad)


def test_the_good_plan_beside_the_bad_ones():
    _hand().runner.launch(_run())


@pytest.mark.parametrize("start", [-1, 10, 12, 32])
def test_a_bad_start_is_refused_where_the_rest_is_as_in_the_step_before(start):
    hand = _hand()
    hand.runner.launch(_run())
    with pytest.raises(PlanError):
        hand.runner.launch(_run(starts=[start]))


def test_rows_that_were_there_a_step_ago_are_refused_once_they_are_dropped():
    hand = _hand()
    hand.runner.launch(_run())
    with pytest.raises(PlanError):
        hand.runner.launch(_run(starts=[11], drops=[0]))


def test_a_block_that_is_missing_is_refused_where_the_rest_is_as_in_the_step_before():
    hand = _hand()
    for start in range(10, 16):
        hand.runner.launch(_run(starts=[start]))
    with pytest.raises(PlanError, match="17 in row 0, which has 16 tokens' blocks"):
        hand.runner.launch(_run(starts=[16]))


def test_a_row_that_changes_hands_draws_as_its_new_owner_asks():
    ids, again = prompts(2)[0][:4], [5, 6, 7]
    hand = Hand(MODEL)
    hand.generate(0, ids, 3, params=RANDOM, seed=3)
    alone = Hand(MODEL).generate(0, again, 6, params=RANDOM, seed=8)
    # The prompt's rows, counts and slots, and then the decodes', are those of the row's first owner.
    assert hand.generate(0, again, 2) == oracle(MODEL, again, 2)
    assert hand.generate(0, again, 6, params=RANDOM, seed=8) == alone


def test_min_tokens_is_looked_at_in_each_step_of_the_same_rows():
    params = SamplingParams(temperature=0.0, min_tokens=3)
    free = oracle(MODEL, [1, 2, 3], 8)
    hand = Hand(MODEL)
    got = hand.generate(0, [1, 2, 3], 8, params=params, suppressed_ids=i32(range(1, VOCAB)))
    assert got[:3] == [0, 0, 0]
    assert got[3:] == oracle(MODEL, [1, 2, 3, 0, 0, 0], 5) and free[:3] != got[:3]


def test_slots_of_a_table_may_come_in_any_order():
    hand = _hand()
    assert hand.state.tables[0, :2].tolist() == hand.tables[0]
    hand.runner.launch(plan(2, delta_rows=[0, 1, 0], delta_slots=[3, 1, 2], delta_blocks=[5, 4, 6]))
    assert hand.state.tables[0].tolist() == [*hand.tables[0], 6, 5] and hand.state.tables[1, 1] == 4
    assert hand.state.blocks_set.tolist() == [4, 2, 0, 0]


def test_too_many_tokens_are_refused():
    hand = Hand(MODEL, max_tokens=16)
    for row in range(2):
        hand.admit(row, list(range(9)))
    with pytest.raises(PlanError, match="max_num_batched_tokens 16"):
        hand.run((0, 9), (1, 9))


def test_packed_columns_come_out_as_they_went_in():
    arrays = [
        np.arange(5), np.array([], np.int64), np.arange(3, dtype=np.int32), np.array([2**63 + 1], np.uint64),
        np.arange(6, dtype=np.int32).reshape(2, 3),
    ]  # fmt: skip
    memory = torch.full((packed_size(arrays) + 16,), 255, dtype=torch.uint8)[16:]
    pack(arrays, memory)
    for array, tensor in zip(arrays, unpack(arrays, memory.clone()), strict=True):
        assert tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)


def test_upload_on_a_cpu_is_the_same_memory():
    array = np.arange(3)
    (tensor,) = Upload(CPU)(array)
    array[0] = 7
    assert tensor.tolist() == [7, 1, 2]
