"""What this process remembers of one open request."""

from __future__ import annotations

from ..proto.work import Generate
from .beams import BeamTexts
from .sequence import TextSequence


class Request:
    """Whose it is, and its live children. ``submitted``: the scheduler knows it.

    ``include``: the text of what ended a child is shown. ``silent``: no text is wanted. ``eos`` are the ids that end
    a child with no stop reason. ``beams`` is there for a beam search with stop strings.
    """

    __slots__ = ("attempt", "beam_search", "beams", "eos", "epoch", "include", "peer", "sequences", "silent", "size",
                 "submitted", "uid")  # fmt: skip

    def __init__(self, uid: int, attempt: int, peer: str, size: int):
        self.uid, self.attempt, self.peer, self.size = uid, attempt, peer, size
        self.sequences: dict[int, TextSequence] = {}
        self.eos: list[int] = []
        self.beams: BeamTexts | None = None
        self.epoch = -1  # of the scheduler that it was submitted to
        self.include = self.beam_search = self.silent = self.submitted = False

    def open(self, work: Generate, sequences: dict[int, TextSequence], beams: BeamTexts | None) -> None:
        """Tokens may come, and are decoded as ``work`` asks."""
        params, self.eos, self.sequences, self.beams = work.params, work.eos, sequences, beams
        self.include, self.beam_search = params.include_stop_str_in_output, params.use_beam_search
        self.silent = not params.detokenize

    def shows_end(self, last: int, stop_id: int) -> bool:
        """Whether the token that ended a child is shown: always where a stop string ended a beam, not a token."""
        return self.include or (self.beam_search and stop_id < 0 and last not in self.eos)
