"""Lines of the log that hold no control character, whatever a client had written into them: text, or JSON objects."""

from __future__ import annotations

import json
import logging
import os
import re
import time

FORMATS = ("text", "json")
"""What ``--log-format`` takes."""
_IDENTITY = re.compile(r"\b([a-z_]+-[0-9a-f]{8})[0-9a-f]{24}\b")
"""A process's identity; 8 digits tell it from others, and are enough for `quire workers`."""


def printable(text: str) -> str:
    """``text`` with its control characters, and all else that cannot be printed, as escapes: it stays on its line, and
    does nothing to a terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def told(record: logging.LogRecord) -> str:
    """A record's message, with identities of processes cut short."""
    return printable(_IDENTITY.sub(r"\1", record.getMessage()))


def as_json(
    level: str, process: str, pid: int, message: str, request: str | None = None, trace: str | None = None,
    at: float | None = None,
) -> str:  # fmt: skip
    """One line of ``--log-format json``. ``at`` is a time of ``time.time``; None is now."""
    at = time.time() if at is None else at
    moment = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03d}Z"
    line = {"time": moment, "level": level, "process": process, "pid": pid, "message": message}
    if request is not None:
        line["request_id"] = request
    if trace is not None:
        line["exception"] = trace
    return json.dumps(line)  # in ASCII: what JSON escapes does nothing to a terminal


def counted(number: int, what: str) -> str:
    """``1 replica``, ``2 replicas``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class LineFormatter(logging.Formatter):
    """A record is one line. Those of a traceback follow, each set in, so that none can pass for a record.

    A record that is about a request has the attribute ``request_id``.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record's line."""
        record.message = told(record)
        name = getattr(record, "request_id", None)
        if name is not None and name not in record.message:
            record.message += f" [request {name}]"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the traceback where there is one."""
        first, *rest = super().format(record).split("\n")
        return "\n".join([first, *("  | " + printable(line) for line in rest)])


class JsonFormatter(logging.Formatter):
    """A record is one JSON object on a line: time (UTC), level, process, pid, message, and where they apply request_id
    and exception."""

    def __init__(self, process: str):
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        trace = self.formatException(record.exc_info) if record.exc_info else None
        name, level = getattr(record, "request_id", None), record.levelname.lower()
        return as_json(level, self.process, os.getpid(), told(record), name, trace, record.created)
