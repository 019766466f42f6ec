"""The HTTP requests that generate, by id: which may be ended from another connection."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..client.stream import RequestStream


@dataclass(slots=True)
class OpenCall:
    """One HTTP request: whose it is, the ids by which it is known, and what it runs."""

    owner: str
    ids: list[str] = field(default_factory=list)
    streams: list[RequestStream] = field(default_factory=list)


class OpenCalls:
    """Those of one frontend. Two may have one id, for clients choose theirs."""

    def __init__(self) -> None:
        self._named: dict[tuple[str, str], list[OpenCall]] = {}

    def __len__(self) -> int:
        """How many ids are known."""
        return len(self._named)

    def name(self, call: OpenCall, id: str) -> None:
        """Have ``call`` be known by ``id``, too."""
        call.ids.append(id)
        self._named.setdefault((call.owner, id), []).append(call)

    def close(self, call: OpenCall) -> None:
        """It has been answered."""
        for id in call.ids:
            left = [each for each in self._named.pop((call.owner, id), ()) if each is not call]
            if left:
                self._named[call.owner, id] = left

    def cancel(self, id: str, owner: str) -> bool:
        """End what ``owner`` runs by this id; False where nothing is."""
        open_streams = [s for call in self._named.get((owner, id), ()) for s in call.streams if not s.done]
        for stream in open_streams:
            stream.cancel()
        return bool(open_streams)
