"""An administrator's /start_profile and /stop_profile: told to every worker, answered when all have done it."""

from __future__ import annotations

import pytest
from scheduler_house import House

from quire.proto.config import ConfigError
from quire.proto.messages import Profile, Profiled, Sleep, Sleeping
from quire.proto.profiler import profiler_config


class Studio(House):
    """A house of two workers and a frontend."""

    def __init__(self) -> None:
        super().__init__()
        self.hello("f", "frontend")
        for name in ("a", "b"):
            self.worker(name)

    def ask(self, action: str, token: int = 1) -> dict[str, Profile]:
        """What each worker is told."""
        self.members.on_front("f", Sleep(token, action))
        messages, self.registry.to_workers = self.registry.to_workers, []
        return {peer: message for peer, message in messages if isinstance(message, Profile)}

    def answers(self) -> list[Sleeping]:
        self.members.tick()
        return self.told("f", Sleeping)


def test_it_is_answered_when_every_worker_has_done_it() -> None:
    studio = Studio()
    for action, on in (("start_profile", True), ("stop_profile", False)):
        told = studio.ask(action)
        assert [message.on for message in told.values()] == [on, on]
        studio.registry.on_worker("a", Profiled(told["a"].lease))
        assert not studio.answers()
        assert not studio.ask(action)  # the same, sent again
        studio.registry.on_worker("b", Profiled(told["b"].lease, "disk full" if on else ""))
        (answer,) = studio.answers()
        assert (answer.token, answer.error) == (1, "disk full" if on else "")


def test_a_worker_that_goes_is_waited_for_no_more() -> None:
    studio = Studio()
    told = studio.ask("stop_profile")
    studio.registry.on_worker("a", Profiled(told["a"].lease))
    studio.registry.gone("b", "fell")
    assert [answer.error for answer in studio.answers()] == [""]
    assert set(studio.ask("stop_profile", 2)) == {"a"}


def test_where_no_worker_is_ready_that_is_said() -> None:
    studio = Studio()
    for name in ("a", "b"):
        studio.registry.gone(name, "fell")
    assert studio.ask("start_profile") == {}
    assert ["no worker is ready" in answer.error for answer in studio.answers()] == [True]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "profiler_config"),
        ("{}", "torch_profiler_dir"),
        ('{"torch_profiler_dir": "traces"}', "must be an absolute path"),
        ('{"torch_profiler_dir": "/t", "profiler": "cuda"}', "profiler must be 'torch', got 'cuda'"),
        ('{"torch_profiler_dir": "/t", "max_iterations": 5}', "max_iterations"),
    ],
)
def test_what_the_flag_cannot_say(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        profiler_config(text)


def test_what_the_flag_says() -> None:
    assert profiler_config(None) is None
    found = profiler_config('{"profiler": "torch", "torch_profiler_dir": "/t"}')
    assert found is not None and (found.torch_profiler_dir, found.torch_profiler_use_gzip) == ("/t", True)
