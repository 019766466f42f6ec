"""The requests of a batch's input: JSON Lines, each with custom_id, method, url and body."""

from __future__ import annotations

import codecs
import hashlib
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..parsing import kind_of

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
POOLING = ("/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/pooling")
ENDPOINTS = (*GENERATING, *POOLING)
"""What a line may ask for."""

_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Line:
    """A request: what its answer is known by, the path, and the body as JSON."""

    custom_id: str
    url: str
    body: bytes


class LineError(Exception):
    """A line that is no request; ``code`` and ``param`` are as OpenAI has them, ``custom_id`` where it has one."""

    def __init__(self, code: str, message: str, param: str | None = None, custom_id: str | None = None):
        super().__init__(message)
        self.code, self.message, self.param, self.custom_id = code, message, param, custom_id


class Lines:
    """A file of requests, of which the places of its lines are held in memory. Empty lines do not count."""

    def __init__(
        self, path: Path, most_bytes: int, endpoints: Collection[str] = ENDPOINTS, most_lines: int | None = None
    ):  # fmt: skip
        """``most_bytes``: a longer line is an error of its own. ``over`` is True where there are over ``most_lines``
        requests, or as many empty lines: what comes after them is not looked at. Raises OSError."""
        self._endpoints, self._most_bytes = endpoints, most_bytes
        self.over = False
        self._starts, self._ends = array("q"), array("q")
        self.numbers = array("q")  # of each request its line in the file, from 1
        digest, at = hashlib.sha256(), 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                if line.strip():
                    self._starts.append(at)
                    self._ends.append(at + len(line))
                    self.numbers.append(number)
                at += len(line)
                if most_lines is not None and max(len(self), number - len(self)) > most_lines:
                    self.over = True
                    break
        self.digest = digest.hexdigest()
        self._file = open(path, "rb")  # noqa: SIM115 - until close

    def __len__(self) -> int:
        return len(self._starts)

    def raw(self, place: int) -> bytes:
        """The bytes of request ``place``, from 0. Raises LineError where there are too many."""
        start, end = self._starts[place], self._ends[place]
        if end - start > self._most_bytes:
            over = f"the line has {end - start} bytes, over the limit of {self._most_bytes}"
            raise LineError("line_too_long", f"{over}; send less, or raise --max-request-bytes.")
        self._file.seek(start)
        return self._file.read(end - start)

    def read(self, place: int) -> Line:
        """Request ``place``, from 0. Raises LineError."""
        return parse_line(self.raw(place), self._endpoints)

    def check(self) -> Iterator[tuple[int, LineError]]:
        """What is wrong, with the number of its line in the file; a custom_id that came before too."""
        seen: set[bytes] = set()  # digests: ids may be long, and lines many
        for place in range(len(self)):
            try:
                custom_id = self.read(place).custom_id
                short = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
                if short in seen:
                    raise LineError(
                        "duplicate_custom_id", f"custom_id {custom_id[:80]!r} was used on a line before; it must be "
                        "unique in a batch.", "custom_id", custom_id,
                    )  # fmt: skip
                seen.add(short)
            except LineError as error:
                yield self.numbers[place], error

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def parse_line(raw: bytes, endpoints: Collection[str] = ENDPOINTS) -> Line:
    """A line of the input. Raises LineError."""
    try:
        found = msgspec.json.decode(raw.strip().removeprefix(codecs.BOM_UTF8), type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise LineError("invalid_json_line", "the line must be a JSON object.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_json_line", f"the line is not valid JSON: {error}.") from error
    custom_id = _text(found, "custom_id", None)
    if not 0 < len(custom_id) <= _ID_CHARS:
        raise LineError(
            "invalid_value", f"custom_id must have 1 to {_ID_CHARS} characters, got {len(custom_id)}.", "custom_id"
        )
    method, url = _text(found, "method", custom_id), _text(found, "url", custom_id)
    if method != "POST":
        raise LineError("invalid_method", f"method must be POST, got {method!r:.80}.", "method", custom_id)
    if url not in endpoints:
        raise LineError(
            "invalid_url", f"url {url!r:.80} is not one of {', '.join(endpoints)}.", "url", custom_id
        )  # fmt: skip
    if "body" not in found:
        raise LineError("missing_required_parameter", "body is missing.", "body", custom_id)
    body = bytes(found["body"])
    if not body.startswith(b"{"):
        raise LineError("invalid_type", "body must be a JSON object.", "body", custom_id)
    return Line(custom_id, url, body)


def _text(found: dict[str, msgspec.Raw], name: str, custom_id: str | None) -> str:
    if name not in found:
        raise LineError("missing_required_parameter", f"{name} is missing.", name, custom_id)
    try:
        value = msgspec.json.decode(found[name])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # what decoding the whole line passes over
        raise LineError("invalid_json_line", f"{name} is not valid JSON: {error}.", name, custom_id) from error
    if not isinstance(value, str):
        raise LineError("invalid_type", f"{name} must be a string, got {kind_of(value)}.", name, custom_id)
    return value
