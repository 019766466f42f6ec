"""Histories of chance for Engine's core: whatever is lost, every request comes to what it must, none is forgotten."""

import random
from collections import Counter

import pytest
from engine_rig import EngineRig, text_of

from quire.proto import messages as m
from quire.proto.codec import from_i32
from quire.proto.params import SamplingParams


def told(uid, index):
    """What the model says as child ``index`` of a request."""
    return [(uid * 7 + index * 3 + place) % 26 for place in range(3 + (uid + index) % 6)]


class History:
    """Detokenizers that serve what they are sent, a step at a time, and faults in between."""

    def __init__(self, seed):
        self.rng, self.rig = random.Random(seed), EngineRig(3)
        self.held = {each.name: {} for each in self.rig.detokenizers}  # by uid: the message, and tokens of each child
        self.accepted, self.requests, self.epoch = set(), [], 1000

    def look(self, each):
        """It reads what it was sent; a higher attempt replaces a lower one."""
        held = self.held[each.name]
        while each.got:
            message = each.got.popleft()
            if isinstance(message, m.Tokenize):
                known = held.get(message.uid)
                if known is None or known[0].attempt < message.attempt:
                    n, resume = message.work.params.n, {r.index: len(from_i32(r.ids)) for r in message.resume}
                    held[message.uid] = message, resume or dict.fromkeys(range(n), 0)
            elif isinstance(message, m.Abort):
                held.pop(message.uid, None)

    def serve(self, lose=0.0):
        """One of them accepts a request, or says a few more tokens of one; with chance ``lose`` unheard, or twice."""
        each = self.rng.choice(self.rig.detokenizers)
        self.look(each)
        held = self.held[each.name]
        if not held or not each.identity:
            return
        message, children = held[self.rng.choice(list(held))]
        if (message.uid, message.attempt) not in self.accepted:
            self.accepted.add((message.uid, message.attempt))
            each.accept(message)
            return
        index = self.rng.choice(list(children))
        tokens, at = told(message.uid, index), children[index]
        end = at + self.rng.randrange(1, 4)
        finish = m.Finish.STOP if end >= len(tokens) else m.Finish.NONE
        for _ in range(0 if self.rng.random() < lose else 2 if self.rng.random() < lose else 1):
            new = tokens[at:end]
            each.text(message, at, new, "".join(chr(97 + t) for t in new), finish, index)
        children[index] = min(end, len(tokens))
        if finish:
            del children[index]
        if not children:
            held.pop(message.uid, None)

    def fault(self):
        each = self.rng.choice(self.rig.detokenizers)
        kind = self.rng.choice(["cut", "away", "back", "silent", "leave", "forget", "scheduler", "time"])
        if kind == "cut" and each.identity:
            self.held[each.name].clear()
            each.cut()
        elif kind in ("away", "back"):
            each.reachable = kind == "back"
        elif kind == "silent":
            each.heartbeats = not each.heartbeats
        elif kind == "leave" and each.identity:
            self.held[each.name].clear()
            each.send(m.Bye())
            self.rig.peers(self.epoch, [other for other in self.rig.detokenizers if other is not each])
            self.rig.peers(self.epoch)
        elif kind == "forget" and self.held[each.name] and each.identity:
            message, _ = self.held[each.name].pop(self.rng.choice(list(self.held[each.name])))
            each.unknown(message)
        elif kind == "scheduler":
            self.epoch += 1
            self.rig.peers(self.epoch, self.rng.sample(self.rig.detokenizers, self.rng.randrange(4)))
            self.rig.peers(self.epoch)
        elif kind == "time":
            self.rig.wait(self.rng.randrange(1, 5))

    def check(self):
        """Every open request is in one place, and the others in none."""
        core = self.rig.core
        at = [uid for link in core.links.values() for uid in link.open]
        waiting = [request.uid for request in core._placement.waiting]
        assert Counter(at + waiting) == Counter(core.open.keys())
        assert set(core._unaccepted) == {uid for uid, request in core.open.items() if request.accepted is None}
        assert core._unaccepted_bytes == sum(core._unaccepted.values())

    def reconcile(self):
        """As a detokenizer answers Reconcile: unknown is what it does not have."""
        for each in self.rig.detokenizers:
            self.look(each)
            if each.identity:
                there = self.rig.core.links[each.identity].open.values()
                lacks = [r.again() for r in there if (r.uid, r.attempt) not in self.known(each)]
                each.unknown(*lacks)

    def known(self, each):
        return {(message.uid, message.attempt) for message, _ in self.held[each.name].values()}


@pytest.mark.parametrize("seed", range(40))
def test_every_request_comes_to_what_it_must(seed):
    history = History(seed)
    rng, rig = history.rng, history.rig
    for step in range(400):
        if step < 300 and rng.random() < 0.1:
            history.requests.append(rig.submit(SamplingParams(n=rng.randrange(1, 3))))
        if rng.random() < 0.08:
            history.fault()
        history.serve(lose=0.05)
        history.check()
    for each in rig.detokenizers:
        each.reachable = each.heartbeats = True
    for _ in range(3000):
        if not rig.core.open:
            break
        rig.wait(1)
        history.reconcile()
        for _ in range(10):
            history.serve()
        history.check()
    assert not rig.core.open and not rig.core._unaccepted
    ended = Counter()
    for request in history.requests:
        assert request.done
        ended[request.error.status if request.error else 0] += 1
        if request.error is None:
            for index, child in enumerate(request.children):
                tokens = told(request.uid, index)
                assert (child.tokens, text_of(request, index)) == (tokens, "".join(chr(97 + t) for t in tokens))
        else:
            assert request.error.status in (500, 503), request.error
    assert ended[0] >= len(history.requests) * 0.8, ended
