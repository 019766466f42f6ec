"""The rule by which a request is taken for the cause of its losses, as a table."""

import pytest

from quire.proto.losses import MAX_LOSSES, Losses

# Points at which losses find the request; the count after each; the point after the last; in quarantine there?;
# exhausted?
TABLE = [
    ([], [], 0, False, False),
    ([0], [1], 0, False, False),
    ([0, 0], [1, 2], 0, True, False),
    ([0, 0], [1, 2], 1, False, False),  # it has passed the point
    ([0, 0, 0], [1, 2, 3], 0, True, True),
    ([0, 0, 5], [1, 2, 1], 5, False, False),  # progress since
    ([5, 3, 5], [1, 2, 3], 5, True, True),  # a restart from less is none
    ([5, 3], [1, 2], 5, True, False),  # at the furthest point is not past it
    ([5, 3], [1, 2], 6, False, False),
    ([5, 6, 7, 8, 9], [1, 1, 1, 1, 1], 9, False, False),  # a long request survives any number
    ([5, 6, 6, 7, 7], [1, 1, 2, 1, 2], 7, True, False),
]


@pytest.mark.parametrize(("losses", "counts", "reached", "quarantine", "exhausted"), TABLE)
def test_the_rule(losses, counts, reached, quarantine, exhausted):
    found, seen = Losses(), []
    for point in losses:
        found.lost(point)
        seen.append(found.count)
    assert seen == counts and found.furthest == max(losses, default=-1)
    assert (found.in_quarantine(reached), found.exhausted) == (quarantine, exhausted)


@pytest.mark.parametrize("limit", [1, 2, MAX_LOSSES])
def test_where_nothing_progresses_the_limit_alone_decides(limit):
    found = Losses(limit=limit)
    for count in range(limit):
        assert not found.exhausted and found.in_quarantine() == (count == limit - 1 and count > 0)
        found.lost()
    assert found.exhausted


def test_a_count_that_came_by_message_stands_at_its_point():
    found = Losses(2, 7)
    assert found.in_quarantine(7) and not found.in_quarantine(8)
    found.lost(7)
    assert found.exhausted


def test_a_loss_without_a_point_is_at_point_0():
    found = Losses()
    found.lost()
    assert found.furthest == 0 and found.count == 1


def test_a_point_that_others_got_to_is_no_progress():
    found = Losses()
    found.begin(9)
    assert found == Losses()
    found.lost(0)
    found.begin(9)
    found.lost(9)
    assert found.in_quarantine(9) and not found.in_quarantine(10)
    found.begin(4)
    assert found.furthest == 9


def test_progress_that_ends_with_no_loss_counts_too():
    found = Losses(2, 7)
    found.leave(7)
    assert found.count == 2
    found.leave(8)
    assert found.count == 0
