"""One TokenBatch to one TextBatch an Engine: the part of a step that does no IO."""

from __future__ import annotations

import logging

from ..proto.codec import from_i32
from ..proto.messages import Finish, Logprobs, Stopped, TokenBatch
from ..proto.request_name import about
from .columns import Outbox, pairs_of, rows_of
from .logprobs import TokenTexts, cut, logprobs_of
from .request import Request
from .sequence import TextSequence

log = logging.getLogger(__name__)


class Step:
    """What a batch means: ``outboxes`` for Engines, children ``stopped`` by a string, requests that ``lost`` tokens.

    Children that end, and requests all of whose children have, are taken out of ``requests``.
    """

    def __init__(self, requests: dict[int, Request], texts: TokenTexts | None):
        self._requests, self._texts = requests, texts
        self.outboxes: dict[str, Outbox] = {}
        self.stopped: list[Stopped] = []
        self.lost: list[Request] = []

    def take(self, message: TokenBatch) -> None:
        """Raises BadFrame, before anything is changed, where columns disagree."""
        rows = rows_of(message)
        tokens = from_i32(message.tokens)
        records = logprobs_of(message, [row[4] for row in rows])
        if message.started_uids or message.started_cached:
            self._note_started(message)
        box: Outbox  # of ``peer``
        peer, end = "", 0
        for at, (uid, attempt, index, offset, count, finish, stop_id) in enumerate(rows):
            start, end = end, end + count
            request = self._requests.get(uid)
            if request is None or request.attempt != attempt:
                continue  # aborted, or of another attempt
            sequence = request.sequences.get(index)
            if sequence is None:
                continue  # a stop string ended it while the scheduler went on
            push = sequence.text_of
            if push is None or count != 1 or finish or offset != sequence.count or at in records:
                self._row(request, sequence, index, offset, tokens[start:end], finish, stop_id, records.get(at))
                continue
            if peer != request.peer:
                peer, box = request.peer, self._outbox(request.peer)
            token = tokens[start]
            sequence.count = offset + 1
            box.rows.append((uid, attempt, index, offset, push(token)))
            box.tokens.append(token)

    def _note_started(self, message: TokenBatch) -> None:
        for uid, cached in pairs_of(message.started_uids, message.started_cached):
            if (request := self._requests.get(uid)) is not None:
                self._outbox(request.peer).started.append((uid, cached))

    def _row(
        self, request: Request, sequence: TextSequence, index: int, offset: int, tokens: list[int], finish: int,
        stop_id: int, record: Logprobs | None,
    ) -> None:  # fmt: skip
        """A row that is more, or less, than one token of a child that goes on."""
        count, have = len(tokens), sequence.count - offset
        if have < 0:
            self._lose(request, index, sequence.count, offset)
            return
        if have:  # these are here already
            tokens = tokens[have:]
            if not tokens and finish == Finish.NONE:
                return
        offset = sequence.count
        include = bool(tokens) and request.shows_end(tokens[-1], stop_id)
        news = sequence.advance(tokens, finish, stop_id, include)
        if record is not None:
            record = cut(record, count, have, have + news.used)
            if record is not None and self._texts is not None and not request.silent:
                self._texts.fill(record)
        box = self._outbox(request.peer)
        box.add(request.uid, request.attempt, index, offset, tokens[: news.used], news, record)
        if sequence.done:
            self._ended(request, index, finish == Finish.NONE)

    def _outbox(self, peer: str) -> Outbox:
        box = self.outboxes.get(peer)
        if box is None:
            box = self.outboxes[peer] = Outbox()
        return box

    def _ended(self, request: Request, index: int, by_string: bool) -> None:
        sequence = request.sequences.pop(index)
        if by_string:
            self.stopped.append(Stopped(request.uid, request.attempt, index, sequence.count))
        if not request.sequences:
            self._requests.pop(request.uid, None)

    def _lose(self, request: Request, index: int, have: int, offset: int) -> None:
        """Tokens of a request are missing, which must not happen. Its Engine has all before them and sends it again."""
        log.error(
            "sequence %d has %d tokens and was sent those from %d on", index, have, offset, extra=about(request.uid)
        )
        self._requests.pop(request.uid, None)
        self.lost.append(request)
