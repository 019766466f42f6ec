"""Containers come and go under load; every stream ends with the tokens of an undisturbed run.

These tests run in the order in which they stand, on one project. They need a Docker engine and an image to build on:

    QUIRE_COMPOSE_BASE=python:3.12-slim QUIRE_COMPOSE_LOG=report.log pytest tests/compose
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from compose.engine import FRONTENDS, Compose
from compose.load import Answer, Load, bodies

STREAMS, TOKENS = 24, 400
AWAY_S = 12.0
SERVICES = ("scheduler", "detokenizer", "gpu_worker")

pytestmark = pytest.mark.timeout(900)


def disturbed(compose: Compose, act: Callable[[], object], at: float = 0.25) -> list[Answer]:
    """Open the streams, act when the share ``at`` of their tokens has come, and return their answers."""

    async def run() -> list[Answer]:
        load = Load(compose.urls(), bodies(STREAMS, TOKENS))
        await load.until(int(STREAMS * TOKENS * at))
        compose.note(f"{load.open} streams open, {load.tokens} tokens so far")
        await asyncio.to_thread(act)
        compose.note(f"done; {load.open} streams open, {load.tokens} tokens so far")
        answers = await load.finish()
        seconds = load.ended - load.started
        compose.note(f"{load.tokens} tokens in {seconds:.1f} s, {load.tokens / seconds:.0f} a second")
        return answers

    return asyncio.run(run())


def check(compose: Compose, answers: list[Answer], reference: list[Answer]) -> None:
    """Every answer is that of the undisturbed run."""
    errors = [answer.error for answer in answers if answer.error]
    different = [i for i, (a, b) in enumerate(zip(answers, reference, strict=True)) if a.same != b.same]
    compose.note(f"= {len(answers) - len(different)} of {len(answers)} streams as in the undisturbed run")
    assert not errors
    assert not different


@pytest.fixture(scope="module")
def reference(compose: Compose) -> list[Answer]:
    """The streams with nothing happening to any container."""
    compose.note(f"undisturbed: {STREAMS} streams of {TOKENS} tokens on 1 worker")
    answers = disturbed(compose, lambda: None)
    assert not [answer.error for answer in answers if answer.error]
    assert {answer.finish for answer in answers} <= {"length", "stop"}
    return answers


def test_only_http_is_published_and_nobody_is_root(compose):
    published = set()
    for service in ("frontend", *SERVICES):
        for container in compose.containers(service):
            found = compose.inspect(container)
            published |= {(service, port) for port, hosts in found["NetworkSettings"]["Ports"].items() if hosts}
            assert found["Config"]["User"] == "quire"
            assert found["HostConfig"]["ReadonlyRootfs"]
            assert found["HostConfig"]["CapDrop"] == ["ALL"]
    assert published == {("frontend", "8000/tcp")}
    compose.run("exec", "-T", "detokenizer", "python", "/opt/healthcheck.py", "answers", "5610")
    assert compose.run("exec", "-T", "scheduler", "stat", "-c", "%a %U", "/keys/quire.key").split() == ["600", "quire"]


def test_only_the_worker_has_torch(compose):
    code = "import importlib.util as u; print(*[n for n in ('torch', 'triton') if u.find_spec(n)])"
    has = {
        service: compose.run("exec", "-T", service, "python", "-c", code).split() for service in ("frontend", *SERVICES)
    }
    assert has == {"frontend": [], "scheduler": [], "detokenizer": [], "gpu_worker": ["torch", "triton"]}


def test_more_workers_add_capacity_under_load(compose, reference):
    blocks = compose.metric("quire:kv_blocks")
    before = compose.containers("gpu_worker")

    def more() -> None:
        compose.workers = 3
        compose.up()
        compose.wait_metric("quire:replicas", 3)

    check(compose, disturbed(compose, more), reference)
    assert compose.metric("quire:kv_blocks") > 2 * blocks
    assert set(before) < set(compose.containers("gpu_worker"))
    compose.note("the same streams on three workers")
    check(compose, disturbed(compose, lambda: _workers(compose)), reference)
    assert [(state, int(step) > 0) for _, _, state, _, _, step, *_ in _workers(compose)] == [("ready", True)] * 3


def test_fewer_workers_lose_nothing_under_load(compose, reference):
    def fewer() -> None:
        compose.workers = 1
        compose.up()

    check(compose, disturbed(compose, fewer), reference)
    compose.wait_metric("quire:replicas", 1)
    assert len(compose.containers("gpu_worker")) == 1


@pytest.mark.parametrize("service", SERVICES)
def test_docker_kill_loses_nothing(compose, reference, service):
    """The engine does not restart what `docker kill` ended; `docker compose up -d` does."""

    def kill() -> None:
        compose.docker("kill", compose.name(compose.containers(service)[0]))
        compose.up()

    check(compose, disturbed(compose, kill), reference)


@pytest.mark.parametrize("service", SERVICES)
def test_the_restart_policy_brings_back_what_dies(compose, reference, service):
    container = compose.containers(service)[0]
    restarts = compose.inspect(container)["RestartCount"]
    # Every process of the container but its init; that ends with the service, and the container with it.
    answers = disturbed(compose, lambda: _crash(compose, container))
    check(compose, answers, reference)
    assert compose.inspect(container)["RestartCount"] == restarts + 1


@pytest.mark.parametrize("away, back", [("pause", "unpause"), ("network disconnect", "network connect")])
def test_a_worker_out_of_reach_loses_nothing(compose, reference, away, back):
    container = compose.name(compose.containers("gpu_worker")[0])
    where = [compose.network()] if "network" in away else []

    def cut() -> None:
        compose.docker(*away.split(), *where, container)
        time.sleep(AWAY_S)
        compose.docker(*back.split(), *where, container)

    check(compose, disturbed(compose, cut), reference)


def test_a_killed_frontend_loses_only_its_own_connections(compose, reference):
    containers = compose.containers("frontend")
    compose.wait_ready()

    def kill() -> None:
        compose.docker("kill", compose.name(containers[0]))

    answers = disturbed(compose, kill)
    lost = [i for i, answer in enumerate(answers) if answer.error]
    compose.note(f"{len(lost)} streams were cut: those of the killed frontend")
    assert set(lost) <= set(range(0, STREAMS, FRONTENDS))
    assert lost
    others = range(1, STREAMS, FRONTENDS)
    check(compose, [answers[i] for i in others], [reference[i] for i in others])
    compose.wait_metric("quire:num_requests_running", 0)  # what the lost frontend had open has been given up
    compose.wait_metric("quire:kv_blocks_in_use", 0)
    compose.up()
    compose.wait_ready()


def test_replacing_one_service_after_the_other_loses_nothing(compose, reference):
    """As an upgrade does. Frontends come last, and are replaced once their streams have ended."""
    services = (*SERVICES, "frontend")
    before = {service: set(compose.containers(service)) for service in services}

    def replace() -> None:
        for service in services:
            compose.replace(service)
        replaced.update({service: set(compose.containers(service)) for service in services})
        compose.up_again()

    replaced: dict[str, set[str]] = {}
    check(compose, disturbed(compose, replace), reference)
    assert all(not before[service] & set(compose.containers(service)) for service in services)
    assert replaced == {service: set(compose.containers(service)) for service in services}
    compose.wait_ready()


def test_the_whole_ends_politely_and_comes_back_with_its_keys(compose, reference):
    key = compose.run("exec", "-T", "scheduler", "cat", "/keys/quire.key")

    def down() -> None:
        compose.note("$ docker compose down")
        compose.run("down")

    check(compose, disturbed(compose, down, at=0.5), reference)
    assert not compose.run("ps", "-q")
    compose.up()
    compose.wait_ready()
    assert compose.run("exec", "-T", "scheduler", "cat", "/keys/quire.key") == key
    check(compose, disturbed(compose, lambda: None), reference)


def _crash(compose: Compose, container: str) -> None:
    began = compose.inspect(container)["State"]["StartedAt"]
    try:
        compose.docker("exec", compose.name(container), "python", "-c", "import os; os.kill(-1, 9)")
    except RuntimeError:
        pass  # the container ended before its answer
    deadline = time.monotonic() + 60
    while (state := compose.inspect(container)["State"])["StartedAt"] == began or not state["Running"]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{container} did not come back within 60 s")
        time.sleep(0.1)


def _workers(compose: Compose) -> list[list[str]]:
    """`quire workers list`: a list of words for each."""
    command = "quire workers list --scheduler tcp://127.0.0.1:5600 --keys /keys/quire.key"
    compose.note(f"$ docker compose exec scheduler {command}")
    lines = compose.run("exec", "-T", "scheduler", *command.split()).splitlines()
    for line in lines:
        compose.note(f"    {line}")
    return [line.split() for line in lines[1:]]
