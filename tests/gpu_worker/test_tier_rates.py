"""What is measured of loads and prompts."""

from __future__ import annotations

from quire.gpu_worker.tiers.rates import KEPT, PromptRate, Rate


def test_rates_are_what_most_take():
    rate = Rate()
    for seconds in [1.0] * KEPT + [4.0, 90.0]:
        rate.add(2, seconds)
    assert rate.each == 0.5
    prompts = PromptRate()
    for _ in range(3):
        prompts.add(40, 0.4)  # mostly what a step takes however few its tokens are
        prompts.add(400, 0.8)
    prompts.add(800, 90.0)  # once: it says nothing
    prompts.add(5, 1e-9)
    assert prompts.each == 0.002


class Meanwhile(int):
    """A size of step; whoever looks at it is interrupted by a thread that adds another."""

    def __hash__(self) -> int:
        self.rate.add(40, 0.5)
        return int(self)


def test_a_rate_is_told_while_a_step_is_added():
    rate, size = PromptRate(), Meanwhile(6)
    size.rate = rate
    rate._steps.append((size, 0.5))
    assert rate.each == 0.5
