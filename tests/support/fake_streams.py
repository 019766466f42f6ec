"""Streams of a device that is not there. Work waits in its stream until somebody lets it run, in any legal order.

The host only enqueues. Within a stream work runs in order; between streams only events order it. ``choose`` says which
stream goes on, so that a test can go through the orders that a real device might take.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

Choose = Callable[[int], int]
"""Of so many streams that could go on: the number of one; that many itself: none goes on for now."""


def at_once(count: int) -> int:
    """Work runs as soon as it may: nobody sees that the device is another one."""
    return 0


def as_late_as_possible(count: int) -> int:
    """Work runs when the host waits for it."""
    return count


def at_random(seed: int) -> Choose:
    """Any order, and now and then a long pause."""
    rng = random.Random(seed)
    stop = rng.choice([0.05, 0.3, 0.7, 0.95])
    return lambda count: count if rng.random() < stop else rng.randrange(count)


class Work:
    """Something that a stream does, or (without ``run``) a place in it; ``after`` is what has to be done before."""

    __slots__ = ("after", "done", "run")

    def __init__(self, run: Callable[[], object] | None = None, after: Work | None = None):
        self.run, self.after, self.done = run, after, False


class Streams:
    """All streams of a device. ``told`` hears of what the host waits for: a word for each wait."""

    def __init__(self, choose: Choose = at_once, told: Callable[[str], None] = lambda word: None):
        self.choose, self.told = choose, told
        self.all: list[Stream] = []
        self.current = self.default = Stream(self)
        self.running = False

    def step(self, must: bool = False) -> bool:
        """Let one stream go on by one piece of work; False where none can, or ``choose`` lets none."""
        ready = [each for each in self.all if each.queue and (each.queue[0].after is None or each.queue[0].after.done)]
        if not ready or self.running:
            return False
        chosen = self.choose(len(ready))
        if chosen >= len(ready):
            if not must:
                return False
            chosen = self.choose(len(ready)) % len(ready)
        work = ready[chosen].queue.popleft()
        self.running = True
        try:
            if work.run is not None:
                work.run()
        finally:
            self.running = False
        work.done = True
        return True

    def go_on(self) -> None:
        """As far as ``choose`` lets it."""
        while self.step():
            pass

    def until(self, done: Callable[[], bool]) -> None:
        """The host sleeps."""
        while not done():
            if not self.step(must=True):
                raise AssertionError("the host waits for work that cannot run: streams wait for one another")

    def finish(self) -> None:
        """All work of all streams."""
        self.until(lambda: not any(each.queue for each in self.all))


class Stream:
    """In the place of torch.cuda.Stream."""

    def __init__(self, streams: Streams):
        self.streams, self.queue = streams, deque[Work]()
        self.number = len(streams.all)
        self.cuda_stream = self.stream_id = self.number
        streams.all.append(self)

    def add(self, run: Callable[[], object] | None = None, after: Work | None = None) -> Work:
        """Enqueue."""
        work = Work(run, after)
        self.queue.append(work)
        self.streams.go_on()
        return work

    def wait_event(self, event: Event) -> None:
        """What comes later here waits for what ``event`` recorded last."""
        if event.mark is not None:
            self.add(after=event.mark)

    def wait_stream(self, other: Stream) -> None:
        """What comes later here waits for all that ``other`` has."""
        self.add(after=other.add())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.streams)
        event.record(self)
        return event

    def query(self) -> bool:
        self.streams.go_on()
        return not self.queue

    def synchronize(self) -> None:
        self.streams.told("stream.synchronize")
        self.streams.until(lambda: not self.queue)


class Event:
    """In the place of torch.cuda.Event."""

    def __init__(self, streams: Streams):
        self.streams = streams
        self.mark: Work | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.mark = (stream or self.streams.current).add()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.streams.current).wait_event(self)

    def query(self) -> bool:
        """Never recorded counts as done, as CUDA has it."""
        self.streams.go_on()
        return self.mark is None or self.mark.done

    def elapsed_time(self, end: Event) -> float:
        """No time passes here."""
        return 0.0

    def synchronize(self) -> None:
        self.streams.told("event.synchronize")
        mark = self.mark
        if mark is not None:
            self.streams.until(lambda: mark.done)
