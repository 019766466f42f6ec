"""FlatLogprobs: logprobs of many tokens in six lists, for those who read them in bulk. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, field
from typing import Any

from .outputs import Logprob

Entries = dict[int, Logprob]


@dataclass
class FlatLogprobs(MutableSequence["Entries | None"]):
    """One entry a token, as in a list of dicts by id: ``flat[i]`` makes such a dict, and a slice is flat again.

    Token i's logprobs are ``logprobs[start_indices[i]:end_indices[i]]``; ``token_ids``, ``ranks`` and
    ``decoded_tokens`` are beside them. What stands there is not changed: entries are only added.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, entries: Iterable[Entries | None]) -> FlatLogprobs:
        """These, one after the other; None has no logprobs, as a prompt's first token."""
        flat = cls()
        flat.extend(entries)
        return flat

    def append(self, value: Entries | None) -> None:
        """One more token's."""
        self.start_indices.append(len(self.logprobs))
        for token, entry in (value or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.logprobs))

    def extend(self, values: Iterable[Entries | None]) -> None:
        """Those of several tokens."""
        for each in values:
            self.append(each)

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return FlatLogprobs.of(self[place] for place in range(*index.indices(len(self))))
        if not isinstance(index, int):
            raise TypeError(f"an index of FlatLogprobs is an integer or a slice, got {type(index).__name__}.")
        start, end = self.start_indices[index], self.end_indices[index]
        return {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
            for at in range(start, end)
        }

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("Cannot set logprobs in FlatLogprobs")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("Cannot delete logprobs from FlatLogprobs")

    def insert(self, index: int, value: Any) -> None:
        """Refused: entries are only added at the end."""
        raise TypeError("Cannot insert logprobs to FlatLogprobs")
