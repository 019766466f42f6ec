"""Whether the workers are to sleep, as an administrator asked, and who waits to hear that they do. No IO.

A worker that sleeps has given its KV cache back, and its weights too unless they were woken first. That is the
scheduler's to know, so a worker that comes in a dead one's place sleeps as well. A scheduler in a dead one's place
learns it from the first worker that says in its Hello that it sleeps.
"""

from __future__ import annotations

from ..proto.messages import Sleep
from ..proto.messages.operators import SLEEP_STATES

WEIGHTS, CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, CACHE)
"""What is put away, by vLLM's names."""
MODES = ("keep", "wait", "abort")
MAX_LEVEL = 2


class Slumber:
    """``tags`` are away, in the order of TAGS; none of them: the workers are awake. ``falling`` is the level of a sleep
    that begins when what runs has ended, 0 where there is none."""

    def __init__(self) -> None:
        self.level = self.falling = 0
        self.tags: tuple[str, ...] = ()
        self.told = False  # an administrator has said something to this scheduler
        self._waiting: dict[tuple[str, int], None] = {}  # peers and the tokens of what they asked for

    @property
    def rest(self) -> int | None:
        """The level of the Rest that workers are given: 0 where they have their weights; None where they are awake."""
        if not self.tags:
            return None
        return self.level if WEIGHTS in self.tags else 0

    @property
    def state(self) -> str:
        """As /metrics tells it: one of SLEEP_STATES, or "" where the weights are awake and the cache is not."""
        return "" if self.rest == 0 else SLEEP_STATES[self.level if self.tags else 0]

    def refusal(self, message: Sleep) -> str:
        """What is wrong with ``message``, in one line; "" for nothing."""
        if message.action not in ("sleep", "wake_up", "ask"):
            return f"unknown action {message.action!r}; it must be sleep, wake_up, ask or reset_prefix_cache."
        if message.action == "sleep" and not 1 <= message.level <= MAX_LEVEL:
            return f"level must be 1 or 2, got {message.level}."
        if message.action == "sleep" and message.mode not in MODES:
            return f"mode must be one of {', '.join(MODES)}, got {message.mode!r}."
        unknown = [tag for tag in message.tags if tag not in TAGS]
        return f"tags must be of {', '.join(TAGS)}, got {unknown[0]!r}." if unknown else ""

    def fall(self, level: int) -> None:
        """It begins when what runs has ended."""
        self.told, self.falling = True, max(self.falling, level)

    def sleep(self, level: int) -> bool:
        """Everything is put away. False where it was already, at this level or a deeper one."""
        before = self.level, self.tags
        self.told, self.falling = True, 0
        self.level, self.tags = max(level, self.level), TAGS
        return before != (self.level, self.tags)

    def wake(self, tags: list[str]) -> bool:
        """These are wanted back; none: all. False where they are there."""
        before, self.told, self.falling = self.tags, True, 0
        self.tags = tuple(tag for tag in self.tags if tags and tag not in tags)
        if not self.tags:
            self.level = 0
        return before != self.tags

    def adopt(self, asleep: int) -> bool:
        """A worker says that it sleeps at this level, by order of a scheduler before this one. True where that is news,
        and nobody has said otherwise since."""
        if self.told or self.tags:
            return False
        self.tags = TAGS if asleep else (CACHE,)
        self.level = asleep or 1
        return True

    def wait(self, peer: str, token: int) -> None:
        """``peer`` is to be answered when the workers have done it."""
        self._waiting[peer, token] = None

    def waits(self, peer: str, token: int) -> bool:
        """It has asked, and was not answered yet."""
        return (peer, token) in self._waiting

    @property
    def awaited(self) -> bool:
        """Somebody waits."""
        return bool(self._waiting)

    def take_waiting(self) -> list[tuple[str, int]]:
        """Those who wait, who are answered now."""
        waiting, self._waiting = list(self._waiting), {}
        return waiting
