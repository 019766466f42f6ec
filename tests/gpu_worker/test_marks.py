"""A GPU's rows that cannot draw: marked on the device, failed alone on the host. Interpreted kernels."""

import math

import pytest
import torch
from kernel_device import DEVICE

pytest.importorskip("triton")

from sampler_rows import Request, state_of, step
from worker_toys import GREEDY, LADDER, Hand, Ladder, ToyModel, oracle, prompts

from quire.gpu_worker.kernels import marks, sampling
from quire.gpu_worker.outcome import FORBIDDEN, NAN
from quire.gpu_worker.parallel.parallel import Group
from quire.gpu_worker.spec import Shard
from quire.proto.messages import SlotFailed
from quire.proto.params import SamplingParams

INF = math.inf
FILTERS = SamplingParams(top_k=3, top_p=0.5, min_p=0.1)


class OnDevice(torch.Tensor):
    """A tensor that takes a GPU's way wherever it is."""

    is_cuda = True


class Poisoned(ToyModel):
    """A toy whose logits of some slots are ``filled`` in the next step."""

    slots, filled = (), math.nan

    def logits(self, hidden):
        logits = super().logits(hidden)
        logits[list(self.slots)] = self.filled
        self.slots = ()
        return logits.as_subclass(OnDevice)


def device_hand(model, **more):
    """Rows, plans and tensors as on a GPU, in the host's memory."""
    if DEVICE == "cuda":
        pytest.skip("compiled kernels do not read the host's memory; test_worker_gpu poisons a model on the card")
    hand = Hand(model, **more)
    hand.runner.program, hand.state.on_host = None, False
    return hand


def test_marks_equal_the_twins():
    values = torch.randn(70, 9, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(70) % 9
    for slot, value in ((0, math.nan), (5, -INF), (31, INF), (32, math.nan), (69, -INF)):
        values[slot, slot % 9] = value
    wide = torch.nn.functional.pad(values, (0, 3), value=math.nan).to(DEVICE)[:, :9]
    chosen = values.gather(1, tokens[:, None]).squeeze(1).to(DEVICE)
    for given in (wide, chosen):
        drawn, told = marks.marked(given, tokens.to(DEVICE))
        want = marks.marked_torch(given, tokens.to(DEVICE))
        assert drawn.dtype == told.dtype == torch.int32
        assert torch.equal(drawn, want[0]) and torch.equal(told, want[1])
        assert drawn.tolist() == tokens.tolist()
        bad = {slot: told[slot].item() for slot in range(70) if told[slot] < 0}
        assert bad == {0: marks.NAN, 5: marks.FORBIDDEN, 32: marks.NAN, 69: marks.FORBIDDEN}
    assert [len(each) for each in marks.marked(wide[:0], tokens[:0].to(DEVICE))] == [0, 0]


@pytest.mark.parametrize("at", [0, 70, 4000])
def test_one_nan_is_drawn_whatever_else_there_is(at):
    """So that it is marked: a row of which a part is NaN is not drawn from what is left, on no device."""
    vocab = 4099
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(at))
    logits[:, at] = math.nan
    logits = logits.to(DEVICE)
    state = state_of([Request(p, 5) for p in (FILTERS, SamplingParams(), GREEDY)], vocab, device=DEVICE)
    params, places = state.of(torch.arange(3, device=DEVICE)), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    thresholds = sampling.threshold(logits, params, True, True, True)
    assert sampling.draw(logits, params, places, thresholds).tolist() == [at] * 3
    values, tokens = sampling.draw_part(logits, params, places, 0)
    assert tokens.tolist() == [at] * 3 and values.isnan().all()


def test_the_sampler_marks_what_the_host_would_refuse():
    cases = [GREEDY, SamplingParams(), FILTERS, SamplingParams(allowed_token_ids=[3], temperature=0.0), GREEDY, FILTERS]
    requests = [Request(params, seed=row) for row, params in enumerate(cases)]
    requests[3].bad_words = [[3]]
    logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    logits[:3] = math.nan
    on_host = step(state_of(requests, 64, device="cpu"), logits.clone(), requests)
    device = step(state_of(requests, 64), logits.clone().to(DEVICE).as_subclass(OnDevice), requests)
    assert device.chosen is None and on_host.told is None
    assert device.told.tolist() == [marks.NAN] * 3 + [marks.FORBIDDEN, *on_host.tokens.tolist()[4:]]
    assert ((device.tokens >= 0) & (device.tokens < 64)).all()  # what the rows keep can be embedded
    assert (on_host.chosen > -INF).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(("filled", "why"), [(math.nan, NAN), (-INF, FORBIDDEN)])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(temperature=0.0, logprobs=2)])
def test_one_row_fails_alone(filled, why, params):
    model = Poisoned()
    hand, asked = device_hand(model), prompts(3)
    for row, ids in enumerate(asked):
        hand.admit(row, ids, params=params if row == 1 else GREEDY)
    got = [[token] for token in hand.run(*[(row, len(ids)) for row, ids in enumerate(asked)]).values()]
    assert not hand.result.failed
    model.slots, model.filled = (1,), filled
    for row, token in hand.run((0, 1), (1, 1), (2, 1)).items():
        got[row].append(token)
    (failed,) = hand.result.failed
    assert failed == SlotFailed(1, *why) and 0 <= got[1][-1] < 97
    assert hand.state.tokens.min() >= 0  # a step that was launched ahead embeds what is there
    hand.drop(1)
    for row, token in hand.run((0, 1), (2, 1)).items():
        got[row].append(token)
    assert not hand.result.failed
    assert [got[row] for row in (0, 2)] == [oracle(model, asked[row], 3) for row in (0, 2)]


def test_the_mark_travels_in_the_tokens_place(monkeypatch):
    """Nothing else goes to the host, and nothing there is looked at before the tokens have come."""
    model, moved = Poisoned(), []
    hand = device_hand(model)
    download = hand.runner._download
    monkeypatch.setattr(
        hand.runner, "_download", lambda tokens, extras=(): moved.append((tokens, extras)) or download(tokens, extras)
    )
    hand.admit(0, [1, 2, 3])
    model.slots = (0,)
    hand.run((0, 3))
    ((tokens, extras),) = moved
    assert tokens.tolist() == [marks.NAN] and tokens.dtype == torch.int32 and not extras
    assert hand.result.failed[0].slot == 0


def test_a_follower_takes_no_mark_for_a_token():
    """Rows with a grammar: the one that fails is advanced by nothing, the others go on."""
    model = Poisoned()
    hand = device_hand(model, grammars=Ladder())
    for row in range(2):
        hand.admit(row, [1, 2, 3], params=LADDER)
    hand.run((0, 3), (1, 3))
    model.slots = (0,)
    hand.run((0, 1), (1, 1))
    assert [each.slot for each in hand.result.failed] == [0]
    hand.drop(0)
    assert hand.run((1, 1)) == {1: 5}


class TwoRanks(Group):
    """The first of two tensor ranks, whose share is all of the vocabulary; the other never wins."""

    def best(self, values, tokens):
        return values, tokens


def test_winners_among_tensor_ranks_are_marked_too():
    model = Poisoned()
    hand = device_hand(model)
    hand.runner.group, model.vocabulary = TwoRanks(Shard(0, 2)), range(97)
    for row, params in enumerate((GREEDY, SamplingParams(), GREEDY)):
        hand.admit(row, [4, 5, 6 + row], params=params)
    model.slots = (0, 1)
    got = hand.run((0, 3), (1, 3), (2, 3))
    assert [(each.slot, each.status) for each in hand.result.failed] == [(0, 500), (1, 500)]
    assert got[2] == oracle(model, [4, 5, 8], 1)[0]
