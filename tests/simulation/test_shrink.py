"""A failing plan is made small, whatever it consists of. The worlds here are toys: a plan and what fails in it."""

from __future__ import annotations

import msgspec

from simulation.shrink import shrink, size


class Params(msgspec.Struct):
    n: int = 1
    stop: list[str] | None = None
    temperature: float = 0.0


class ToyAsk(msgspec.Struct):
    name: str
    ids: list[int] = msgspec.field(default_factory=lambda: [5])
    text: str = ""
    params: Params = msgspec.field(default_factory=Params)
    when: float = 0.0


class ToyFault(msgspec.Struct):
    kind: str
    seconds: float = 0.0


class ToyPlan(msgspec.Struct):
    seed: int
    frontends: int = 1
    asks: list[ToyAsk] = []
    faults: list[ToyFault] = []


def big() -> ToyPlan:
    asks = [
        ToyAsk(f"ask{at}", list(range(at, at + 9)), "words of it", Params(at % 4 + 1, ["x", "y"], 0.7), at / 10)
        for at in range(12)
    ]
    return ToyPlan(7, 3, asks, [ToyFault("kill", 3.0), ToyFault("stop", 8.0), ToyFault("kill", 0.5)])


def test_all_is_left_out_that_does_not_matter():
    def fails(plan):
        return any(fault.kind == "stop" for fault in plan.faults) and any(7 in ask.ids for ask in plan.asks)

    found = shrink(big(), fails)
    assert found.faults == [ToyFault("stop")]
    assert [ask.ids for ask in found.asks] == [[7]]
    assert found == ToyPlan(7, 1, [ToyAsk(found.asks[0].name, [7])], [ToyFault("stop")])
    assert size(found) == 4  # the seed, one name, one id, one kind


def test_numbers_become_as_small_as_they_may():
    def fails(plan):
        return sum(ask.params.n for ask in plan.asks) >= 5 and any(fault.seconds > 2 for fault in plan.faults)

    found = shrink(big(), fails)
    assert sum(ask.params.n for ask in found.asks) == 5
    assert all(ask.params.stop is None and not ask.text and not ask.when for ask in found.asks)
    assert len(found.faults) == 1 and found.faults[0].seconds <= 3.0


def test_parts_that_need_one_another_stay_together():
    def fails(plan):
        names = {ask.name for ask in plan.asks}
        return "ask2" in names and "ask9" in names and len(plan.faults) == 3

    found = shrink(big(), fails)
    assert [ask.name for ask in found.asks] == ["ask2", "ask9"] and len(found.faults) == 3


def test_no_more_is_tried_than_allowed_and_nothing_twice():
    seen = []

    def fails(plan):
        seen.append(msgspec.json.encode(plan))
        return len(plan.asks) > 3

    shrink(big(), fails, tries=40)
    assert len(seen) == 40 == len(set(seen))


def test_the_same_plan_comes_back_where_nothing_can_be_left_out():
    plan = big()
    assert shrink(plan, lambda smaller: False) == plan


class Picky(msgspec.Struct):
    low: int = 0
    high: int = 0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


class PickyPlan(msgspec.Struct):
    part: Picky = msgspec.field(default_factory=Picky)


def test_a_plan_that_cannot_be_is_passed_over():
    found = shrink(PickyPlan(Picky(4, 9)), lambda plan: plan.part.high >= 5)
    assert found == PickyPlan(Picky(0, 5))
