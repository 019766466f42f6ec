"""Answers for an engine of scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.client.generation import OpenGeneration
from quire.client.results import RequestError
from quire.frontend.fake import Say
from quire.proto.messages import Finish


def says(
    text: str, finish: Finish = Finish.STOP, stop: str | None = None, error: RequestError | None = None, step: int = 7
) -> Any:
    """A script in which each of the request's n answers is ``text``, in pieces of ``step`` characters, and ends so."""

    def script(request: OpenGeneration) -> Iterator[Say | RequestError | float]:
        children = range(request.work.params.n)
        for at in range(0, len(text), step):
            for index in children:
                yield Say(index, text[at : at + step])
            yield 0.0
        if error is not None:
            yield error
            return
        for index in children:
            yield Say(index, "", finish=finish, stop_reason=stop)

    return script
