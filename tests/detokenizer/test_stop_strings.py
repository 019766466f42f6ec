"""Stop strings, and one child's state around them, a rule at a time; every short case against the plain way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from quire.detokenizer.sequence import News, TextSequence, first_finish
from quire.detokenizer.stops import StopSet, StopWatch
from quire.proto.messages import Finish

NONE, STOP, LENGTH = Finish.NONE, Finish.STOP, Finish.LENGTH


class Letters:
    """A stream in which a token is the letter of that code; ``held`` is what is shown at the end only."""

    def __init__(self, held: str = ""):
        self.held = held

    def push(self, token: int) -> str:
        return chr(token)

    def finish(self) -> str:
        return self.held

    def copy(self) -> Letters:
        return Letters(self.held)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def sequence(stops: Sequence[str] = (), include: bool = False, held: str = "", **more: int) -> TextSequence:
    return TextSequence(Letters(held), StopSet(list(stops), include) if stops else None, **more)


# ---------------------------------------------------------------- every short case


def first_end(text: str, stops: Sequence[str], quiet: int) -> tuple[int, str] | None:
    """Where the first stop string ends whose last letter is after the first ``quiet``, and the longest of those."""
    for end in range(quiet + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def open_end(text: str, stops: Sequence[str]) -> int:
    """How many letters of the end begin a stop string that is not complete."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def stop_lists() -> Iterator[list[str]]:
    words = ["".join(letters) for n in (1, 2, 3) for letters in itertools.product("ab", repeat=n)]
    yield from ([word] for word in words)
    yield from ([first, second] for first, second in itertools.combinations([*words[2:], "a"], 2))
    yield from (["aab", "ab", "b"], ["abab", "bab", "aba"], ["aaaa", "aab"], ["bba", "ba", "bbab"])


@pytest.mark.parametrize("stops", list(stop_lists()), ids="-".join)
def test_every_short_text_letter_by_letter(stops: list[str]) -> None:
    for letters in itertools.product("ab", repeat=6):
        text = "".join(letters)
        for quiet in (0, 2):
            watch, out, end = StopWatch(StopSet(stops, False)), "", first_end(text, stops, quiet)
            for n, letter in enumerate(text):
                part, hit = watch.feed(letter, n < quiet)
                out += part
                if hit is not None:
                    assert end is not None and (n + 1, hit) == end and out == text[: n + 1 - len(hit)]
                    break
                assert out == text[: n + 1 - open_end(text[: n + 1], stops)]  # no more is held than must be
            else:
                assert end is None and out + watch.rest() == text


@pytest.mark.parametrize("stops", [["ab"], ["aba", "ab"], ["bb", "abb"]], ids="-".join)
@pytest.mark.parametrize("include", [False, True])
def test_every_short_text_however_it_is_cut(stops: list[str], include: bool) -> None:
    for text in map("".join, itertools.product("abc", repeat=5)):
        end = first_end(text, stops, 0)
        expected = text if end is None else text[: end[0] - (0 if include else len(end[1]))]
        for first, second in itertools.combinations_with_replacement(range(6), 2):
            watch, out, hit = StopWatch(StopSet(stops, include)), "", None
            for part in (text[:first], text[first:second], text[second:]):
                shown, hit = watch.feed(part)
                out += shown
                if hit is not None:
                    break
            assert (out + ("" if hit else watch.rest()), hit) == (expected, end and end[1])


# ---------------------------------------------------------------- a watch


@pytest.mark.parametrize("stop", ["]", "^", "-", "\\", "[", "a-", ".", "$^", "&&", "||", "é", "日"])
def test_a_stop_string_may_be_of_any_letters(stop: str) -> None:
    assert StopWatch(StopSet([stop], False)).feed(f"x{stop}y") == ("x", stop)
    assert StopWatch(StopSet([stop], False)).feed("xyz09") == ("xyz09", None)


def test_nothing_is_held_where_the_stop_string_is_to_be_shown() -> None:
    watch = StopWatch(StopSet(["abc"], True))
    assert [watch.feed(part) for part in ("xa", "b", "c")] == [("xa", None), ("b", None), ("c", "abc")]
    assert watch.rest() == ""


def test_what_was_held_goes_out_when_it_goes_on_otherwise() -> None:
    watch = StopWatch(StopSet(["abc"], False))
    assert [watch.feed(part) for part in ("ab", "abx", "y")] == [("", None), ("ababx", None), ("y", None)]


def test_the_rest_is_given_once() -> None:
    watch = StopWatch(StopSet(["abc"], False))
    watch.feed("ab")
    assert (watch.rest(), watch.rest()) == ("ab", "")


def test_a_copy_goes_its_own_way() -> None:
    watch = StopWatch(StopSet(["abc"], False))
    watch.feed("ab")
    other = watch.copy()
    assert watch.feed("x") == ("abx", None)
    assert other.feed("c") == ("", "abc")


def test_a_stop_string_that_is_text_may_begin_another() -> None:
    watch = StopWatch(StopSet(["ab", "bc"], False))
    assert watch.feed("ab", quiet=True) == ("a", None)
    assert watch.feed("c") == ("", "bc")


def test_a_stop_string_that_is_text_may_go_on_to_a_longer_one() -> None:
    watch = StopWatch(StopSet(["ab", "abc"], False))
    assert watch.feed("ab", quiet=True) == ("", None)
    assert watch.feed("c") == ("", "abc")


def test_a_stop_string_of_one_letter_that_is_text_goes_out_at_once() -> None:
    watch = StopWatch(StopSet(["\n"], False))
    assert watch.feed("a\n", quiet=True) == ("a\n", None)


def test_an_empty_text_changes_nothing() -> None:
    watch = StopWatch(StopSet(["ab"], False))
    assert [watch.feed(part) for part in ("", "a", "", "b")] == [("", None), ("", None), ("", None), ("", "ab")]


# ---------------------------------------------------------------- one child


def test_tokens_are_counted_and_go_out_as_text() -> None:
    child = sequence()
    assert child.advance(ids("ab"), NONE, -1, False) == News("ab", 2, NONE, None, -1)
    assert child.advance(ids("c"), NONE, -1, False) == News("c", 1, NONE, None, -1)
    assert (child.count, child.done) == (3, False)


def test_a_new_child_has_no_tokens_and_no_end() -> None:
    assert (sequence().count, sequence().done) == (0, False)


def test_the_first_token_may_complete_a_stop_string() -> None:
    assert sequence(["b"]).advance(ids("b"), NONE, -1, False) == News("", 1, STOP, "b", 1)


def test_an_end_has_its_length() -> None:
    child = sequence()
    child.advance(ids("ab"), NONE, -1, False)
    assert child.advance(ids("c"), LENGTH, -1, False) == News("c", 1, LENGTH, None, 3) and child.done


def test_an_end_brings_what_was_held_back() -> None:
    assert sequence(held="!").advance(ids("a"), LENGTH, -1, False).text == "a!"
    assert sequence(held="!").advance(ids("a"), NONE, -1, False).text == "a"
    assert sequence(["zz"], held="!").advance(ids("az"), LENGTH, -1, False).text == "az!"


def test_an_end_brings_what_might_have_become_a_stop_string() -> None:
    assert sequence(["zz"]).advance(ids("az"), LENGTH, -1, False).text == "az"


def test_no_tokens_at_the_end_bring_what_was_held_back() -> None:
    assert sequence(held="!").advance([], LENGTH, -1, False) == News("!", 0, LENGTH, None, 0)


@pytest.mark.parametrize(("stop_id", "reason"), [(120, 120), (0, 0), (-1, None)])
def test_a_stop_token_is_the_reason(stop_id: int, reason: int | None) -> None:
    assert sequence().advance(ids("ax"), STOP, stop_id, False) == News("a", 2, STOP, reason, 2)


def test_a_stop_token_is_no_reason_of_another_end() -> None:
    assert sequence().advance(ids("ax"), LENGTH, 120, False) == News("ax", 2, LENGTH, None, 2)


def test_a_stop_token_is_shown_where_it_is_asked_for() -> None:
    assert sequence().advance(ids("ax"), STOP, 120, True).text == "ax"


def test_a_stop_string_counts_the_token_that_completes_it() -> None:
    child = sequence(["bc"])
    assert child.advance(ids("abcde"), NONE, -1, False) == News("a", 3, STOP, "bc", 3)
    assert (child.count, child.done) == (3, True)


def test_a_stop_string_overrides_a_stop_token() -> None:
    assert sequence(["b"]).advance(ids("abx"), STOP, 120, False) == News("a", 2, STOP, "b", 2)


def test_a_stop_string_in_what_was_held_back_counts_all_tokens() -> None:
    assert sequence(["c!"], held="!").advance(ids("abc"), LENGTH, -1, False) == News("ab", 3, STOP, "c!", 3)


def test_a_stop_string_in_what_was_held_back_counts_from_the_token_after_min_tokens() -> None:
    for least, reason in ((2, "c!"), (3, None)):
        child = sequence(["c!"], held="!", min_tokens=least)
        assert child.advance(ids("abc"), LENGTH, -1, False).reason == reason


@pytest.mark.parametrize(("least", "length"), [(0, 2), (1, 2), (2, 4), (3, 4), (4, None)])
def test_min_tokens_are_counted_from_the_first_token_of_all(least: int, length: int | None) -> None:
    child = sequence(["b"], min_tokens=least)
    found = child.advance(ids("a"), NONE, -1, False)
    for part in ("ba", "bc"):
        found = child.advance(ids(part), NONE, -1, False) if not child.done else found
    assert found.length == (length or -1)


def test_what_the_client_has_is_not_sent_again() -> None:
    child = sequence(skip_text=3)
    texts = [child.advance(ids(part), NONE, -1, False).text for part in ("ab", "cd", "ef")]
    assert texts == ["", "d", "ef"]


def test_with_no_stream_there_is_no_text() -> None:
    child = TextSequence(None, None)
    assert child.advance([5, 6], STOP, 6, False) == News("", 2, STOP, 6, 2)


def test_a_token_alone_may_go_past_it_all_only_where_there_is_nothing_beside_its_text() -> None:
    assert sequence().text_of is not None and sequence(["a"]).text_of is None
    assert sequence(skip_text=1).text_of is None and TextSequence(None, None).text_of is not None
    found = sequence().text_of
    assert found is not None and found(97) == "a"
    silent = TextSequence(None, None).text_of
    assert silent is not None and silent(97) == ""


# ---------------------------------------------------------------- where resumed output ends


@pytest.mark.parametrize(
    ("given", "most", "least", "end"),
    [
        ([5, 9, 5], 9, 0, (2, STOP, -1)), ([5, 8, 5], 9, 0, (2, STOP, 8)), ([9, 8], 1, 0, (1, STOP, -1)),
        ([8], 1, 0, (1, STOP, 8)), ([5], 1, 0, (1, LENGTH, -1)), ([5, 5, 5], 2, 0, (2, LENGTH, -1)),
        ([5, 5], 3, 0, (2, NONE, -1)), ([9, 5, 9], 9, 2, (3, STOP, -1)), ([9, 9, 5], 9, 2, (2, STOP, -1)),
        ([8, 8], 9, 2, (2, STOP, 8)), ([8, 5], 9, 2, (2, NONE, -1)), ([8], 1, 1, (1, STOP, 8)),
        ([5, 5], 2, 2, (2, LENGTH, -1)),
    ],
)  # fmt: skip
def test_where_resumed_output_ends(given: list[int], most: int, least: int, end: tuple[int, int, int]) -> None:
    assert first_finish(given, [9], [8], most, least) == end
