"""What a key has used of its limits, and what its holder is told of them, in OpenAI's headers.

Requests and tokens are kept in buckets that hold a minute's worth and fill steadily: a key that has been idle may use a
minute's worth at once. Tokens (of prompt and output) are counted as they come. What has been begun is never cut off, so
a bucket may go below zero, and new requests wait until it has filled again. All times are ``time.monotonic``'s.

The counts are those of one frontend process.
"""

from __future__ import annotations

from typing import Any, Protocol

from .errors import ApiError
from .key_file import ApiKey

MINUTE_S = 60.0


class Work(Protocol):
    """A request of a key that runs in the engine, or has ended."""

    done: bool

    @property
    def spent(self) -> int:
        """Tokens of its prompt and its output so far."""

    @property
    def ended_at(self) -> float:
        """When it ended."""


class Bucket:
    """``limit`` a minute; ``level`` of them are left."""

    def __init__(self, limit: int, now: float):
        self.limit, self.level, self._at = limit, float(limit), now

    def fill(self, now: float) -> None:
        """Add what has come since it was last looked at."""
        if now > self._at:
            self.level = min(float(self.limit), self.level + (now - self._at) * self.limit / MINUTE_S)
            self._at = now

    def seconds_to(self, level: float) -> float:
        """How long until ``level`` is there."""
        return max(0.0, (level - self.level) * MINUTE_S / self.limit)


class Meter:
    """What the holder of one key has open, and has used."""

    def __init__(self, key: ApiKey, now: float):
        self.key = key
        self.open = 0  # HTTP requests
        self._works: list[Work] = []
        self._requests = _bucket(key.requests_per_minute, None, now)
        self._tokens = _bucket(key.tokens_per_minute, None, now)

    def renew(self, key: ApiKey, now: float) -> None:
        """The key's line has changed: what is used already stays used."""
        self.key = key
        self._requests = _bucket(key.requests_per_minute, self._requests, now)
        self._tokens = _bucket(key.tokens_per_minute, self._tokens, now)

    def enter(self, now: float) -> None:
        """A request begins; ``leave`` must follow. Raises ApiError 429 where a limit is reached."""
        key = self.key
        if key.concurrent_requests is not None and self.open >= key.concurrent_requests:
            raise self._refusal("concurrent_requests", f"{self.open} requests open", "wait for one to end", 1.0)
        self.check_tokens(now)
        if (requests := self._requests) is not None:
            requests.fill(now)
            if requests.level < 1:
                raise self._refusal("requests_per_minute", "used them up", "send less", requests.seconds_to(1))
            requests.level -= 1
        self.open += 1

    def check_tokens(self, now: float) -> None:
        """Raises ApiError 429 where the tokens of a minute are used up."""
        if (tokens := self._tokens) is not None:
            self._settle(tokens, now)
            if (left := tokens.level - self._running()) < 1:
                wait = tokens.seconds_to(tokens.level + 1 - left)
                raise self._refusal("tokens_per_minute", "used them up", "send less", wait)

    def leave(self, now: float) -> None:
        """A request has been answered, or its client is gone."""
        self.open -= 1
        if self._tokens is not None:
            self._settle(self._tokens, now)

    def watch(self, work: Work) -> None:
        """Count the tokens of a request in the engine."""
        if self._tokens is not None:
            self._works.append(work)

    def charge(self, tokens: int, now: float) -> None:
        """Count tokens that have been spent."""
        if self._tokens is not None:
            self._settle(self._tokens, now)
            self._tokens.level -= tokens

    def headers(self, now: float) -> dict[str, str]:
        """OpenAI's ``x-ratelimit-*`` of the limits there are."""
        told: dict[str, str] = {}
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is None:
                continue
            bucket.fill(now)
            level = bucket.level - (self._running() if what == "tokens" else 0)
            told[f"x-ratelimit-limit-{what}"] = str(bucket.limit)
            told[f"x-ratelimit-remaining-{what}"] = str(max(0, int(level)))
            told[f"x-ratelimit-reset-{what}"] = told_seconds(bucket.seconds_to(bucket.limit + bucket.level - level))
        return told

    def _running(self) -> int:
        return sum(work.spent for work in self._works)

    def _settle(self, tokens: Bucket, now: float) -> None:
        """Take what has ended out of the bucket, as it was when that ended."""
        ended = sorted((work for work in self._works if work.done), key=lambda work: work.ended_at)
        if ended:
            self._works = [work for work in self._works if not work.done]
        for work in ended:
            tokens.fill(min(now, work.ended_at))
            tokens.level -= work.spent
        tokens.fill(now)

    def _refusal(self, name: str, state: str, remedy: str, wait: float) -> ApiError:
        limit = getattr(self.key, name)
        return ApiError(
            429, f"the API key {self.key.name} is limited to {name}={limit} and has {state}; {remedy}, or try again in "
            f"{told_seconds(wait)}.", retry_after=wait,
        )  # fmt: skip


def _bucket(limit: int | None, before: Bucket | None, now: float) -> Bucket | None:
    if limit is None:
        return None
    made = Bucket(limit, now)
    if before is not None:
        before.fill(now)
        made.level -= before.limit - before.level
    return made


def told_seconds(seconds: float) -> str:
    """A duration as OpenAI writes it: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < MINUTE_S:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"


def meter_of(meters: dict[bytes, Any], key: ApiKey, now: float) -> Meter:
    """The meter of a key, which is told where its limits are others than before."""
    meter: Meter | None = meters.get(key.digest)
    if meter is None:
        meter = meters[key.digest] = Meter(key, now)
    elif meter.key is not key:
        meter.renew(key, now)
    return meter
