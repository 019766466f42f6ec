"""Which detokenizer a request goes to, and who waits for one."""

from __future__ import annotations

from collections.abc import Iterator

from .request import OpenRequest

MAX_UNBLAMED = 8
"""So many detokenizers in a row may end with a request in quarantine before they have said which one they prepare."""


class Link:
    """The connection ``identity`` to the detokenizer ``incarnation``. ``listed`` is the scheduler epoch that last named
    it.

    It takes requests once it is ``ready``: connected, and, where the one before it fell ``silent``, heard.
    """

    def __init__(self, identity: str, incarnation: str, endpoint: str, listed: int, silent: bool):
        self.identity, self.incarnation, self.endpoint = identity, incarnation, endpoint
        self.listed, self.silent = listed, silent
        self.failed = self.retry = False  # connecting to it could not even be tried; it is to be tried again
        self.ready = False
        self.heard = 0.0
        self.open: dict[int, OpenRequest] = {}
        self.quarantined: int | None = None  # the request in quarantine that it prepares alone, of any Engine

    def add(self, request: OpenRequest) -> None:
        """``request`` is held by this detokenizer from now on."""
        self.open[request.uid] = request
        request.link = self

    def remove(self, request: OpenRequest) -> None:
        """``request`` is held by this detokenizer no longer."""
        self.open.pop(request.uid, None)
        request.link = None

    def blames(self, request: OpenRequest) -> bool:
        """Whether the loss of this detokenizer counts against ``request``.

        It may have died of any request that it had not accepted yet. One more such loss fails a request in quarantine,
        so a detokenizer prepares one in quarantine alone, whichever Engine it comes from, and says so before: if it
        dies then, it died of that one. Where it always dies before it could say so, it dies of what it receives.
        """
        if request.in_quarantine and self.quarantined is None:
            return request.unblamed >= MAX_UNBLAMED
        if self.quarantined is not None:
            return self.quarantined == request.uid
        return request.started or request.accepted is None


class Placement:
    """``links`` by identity, and the requests that wait for one of them, by uid in the order they came: ``new`` ones
    that nobody has accepted yet, and ``resumed`` ones, which overtake them."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self.new: dict[int, OpenRequest] = {}
        self.resumed: dict[int, OpenRequest] = {}

    @property
    def ready(self) -> list[Link]:
        """The links that take requests."""
        return [link for link in self.links.values() if link.ready]

    @property
    def waiting(self) -> list[OpenRequest]:
        """All requests that wait for a detokenizer."""
        return [*self.resumed.values(), *self.new.values()]

    def place(self, request: OpenRequest, besides: Link | None = None) -> Link | None:
        """The least busy link that is ready, which has ``request`` from then on; else None, and it waits.

        ``besides`` is taken only where there is no other.
        """
        link = self._link_for(besides)
        if link is not None:
            link.add(request)
        else:
            (self.resumed if request.accepted else self.new)[request.uid] = request
        return link

    def place_waiting(self) -> Iterator[tuple[OpenRequest, Link]]:
        """Requests that need wait no longer, each with the link that has it now."""
        for line in (self.resumed, self.new):
            while line and (link := self._link_for(None)) is not None:
                request = line.pop(next(iter(line)))
                link.add(request)
                yield request, link

    def forget(self, request: OpenRequest) -> None:
        """Forget a request that has ended, or has no need of a detokenizer any more."""
        self.new.pop(request.uid, None)
        self.resumed.pop(request.uid, None)
        if request.link is not None:
            request.link.remove(request)

    def _link_for(self, besides: Link | None) -> Link | None:
        links = self.ready
        if len(links) > 1 and besides in links:
            links.remove(besides)
        return min(links, key=lambda link: len(link.open), default=None)
