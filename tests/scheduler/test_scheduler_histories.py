"""Thousands of random histories: whatever happens, every stream is the oracle's and no block is lost.

``scheduler_world`` has the scheduler alone; ``scheduler_members`` puts it behind its membership, with workers that
join, drain, fall silent, hang, break off and come back.
"""

from __future__ import annotations

import pytest
from scheduler_members import MembersWorld
from scheduler_world import World


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_random_histories(part: int) -> None:
    for seed in range(part * 110, part * 110 + 110):
        try:
            World(seed).run()
        except BaseException as error:
            error.add_note(f"history {seed}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_random_histories_of_a_fleet(part: int) -> None:
    for seed in range(part * 40, part * 40 + 40):
        try:
            MembersWorld(seed).run()
        except BaseException as error:
            error.add_note(f"registry history {seed}")
            raise
