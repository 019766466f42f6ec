"""Files and batches as they are kept on disk, and as OpenAI's clients see them. Times are seconds since 1970."""

from __future__ import annotations

from typing import Any

import msgspec

RUNNABLE = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch that is not over."""


class StoredFile(msgspec.Struct):
    """A file of /v1/files; ``owner`` is the name of the key it belongs to, which no client sees."""

    id: str
    owner: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "owner"}
        return {"object": "file", **fields, "status": "processed", "status_details": None}


class Counts(msgspec.Struct):
    """Requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Used(msgspec.Struct):
    """Tokens of the answers of a batch."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "input_tokens": self.prompt, "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output, "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.output,
        }  # fmt: skip


class StoredBatch(msgspec.Struct):
    """A batch of /v1/batches."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_expires_after: int  # seconds that its output is kept for
    status: str = "validating"
    errors: list[dict[str, Any]] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: dict[str, str] | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    model: str | None = None  # of the first answer
    used: Used | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status not in RUNNABLE

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        hidden = ("owner", "output_expires_after", "errors", "used")
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if name not in hidden}
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {"object": "batch", **fields, "errors": errors, "usage": self.used.shown() if self.used else None}


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int | None = None  # of /v1/responses
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Answer(msgspec.Struct):
    response: _Response


_read = msgspec.json.Decoder(_Answer).decode


def count_used(batch: StoredBatch, answer: bytes) -> None:
    """Add the tokens of an answer, a line of the output, to a batch's."""
    try:
        body = _read(answer).response.body
    except msgspec.ValidationError:  # a route that counts otherwise
        return
    batch.model = batch.model or body.model
    used, usage = batch.used or Used(), body.usage or _Usage()
    before = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    after = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    used.prompt += usage.prompt_tokens or usage.input_tokens or 0
    used.output += usage.completion_tokens or usage.output_tokens or 0
    used.cached += before.cached_tokens or 0
    used.reasoning += after.reasoning_tokens or 0
    batch.used = used
