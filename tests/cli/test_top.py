"""``quire top``: what two readings of /metrics say, and the frame that shows it."""

from __future__ import annotations

import io

import pytest

from quire.cli import top
from quire.cli.api import Api
from quire.cli.figures import grown, parse, percentiles, rate, share
from quire.cli.main import make_parser, run
from quire.frontend.fake import FakeServer

PAGE = """# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{model_name="m"}} {tokens}
quire:generation_tokens_total{{model_name="m"}} {tokens}
vllm:prefix_cache_queries_total{{model_name="m"}} {tokens}
vllm:prefix_cache_hits_total{{model_name="m"}} {hits}
vllm:kv_cache_usage_perc{{model_name="m \\"q\\" \x1b]0;x"}} 0.5
quire:kv_blocks{{model_name="m"}} 64.0
vllm:num_requests_running{{model_name="m"}} 3.0
vllm:num_requests_waiting_by_reason{{model_name="m",reason="capacity"}} 2.0
vllm:time_to_first_token_seconds_bucket{{le="0.1",model_name="m"}} {fast}
vllm:time_to_first_token_seconds_bucket{{le="0.2",model_name="m"}} {slow}
vllm:time_to_first_token_seconds_bucket{{le="+Inf",model_name="m"}} {slow}
what is this
"""
OLD = parse(PAGE.format(tokens=100, hits=10, fast=5, slow=5), 10.0)
NEW = parse(PAGE.format(tokens=300, hits=110, fast=5, slow=15), 12.0)


def test_two_readings_make_rates_shares_and_percentiles() -> None:
    assert NEW.total("generation_tokens_total") == 300  # once, though it has two names
    assert NEW.by("num_requests_waiting_by_reason", "reason") == {"capacity": 2.0}
    assert rate("generation_tokens_total", OLD, NEW) == 100.0
    assert share("prefix_cache_hits_total", "prefix_cache_queries_total", OLD, NEW) == 0.5
    assert percentiles("time_to_first_token_seconds", OLD, NEW, (0.5, 1.0)) == pytest.approx([0.15, 0.2])


def test_what_is_not_told_or_began_again() -> None:
    assert grown("generation_tokens_total", NEW, OLD) == 100  # a scheduler of its own counts from 0
    assert NEW.total("nothing") is None and rate("nothing", OLD, NEW) is None
    assert percentiles("time_to_first_token_seconds", NEW, NEW, (0.5,)) is None
    assert share("prefix_cache_hits_total", "prefix_cache_queries_total", NEW, NEW) is None


def test_readings_further_apart_than_the_window_are_compared() -> None:
    pytest.importorskip("rich")
    from quire.cli.top_frame import View

    view = View("http://x")
    view.readings += [OLD, parse(PAGE.format(tokens=1, hits=0, fast=0, slow=0), 100.0)]
    assert view.window() == (OLD, view.readings[-1])


def test_a_frame() -> None:
    rich = pytest.importorskip("rich.console")
    from quire.cli.top_frame import View, bars, duration, frame

    view = View("http://x", hint="why", trouble="nothing answers")
    view.readings += [OLD, NEW]
    out = io.StringIO()
    rich.Console(file=out, width=100).print(frame(view))
    shown = out.getvalue()
    for words in ("nothing answers", "3 running, ? waiting (capacity 2)", "100.0  █", "50.0% in use", "50.0% of prompt",
                  "workers: why", "150 ms"):  # fmt: skip
        assert words in shown, words
    assert "\x1b" not in shown and "\\x1b]0;x" in shown
    early = View("http://x", readings=view.readings)
    early.readings.append(parse(PAGE.format(tokens=300, hits=110, fast=50, slow=60), 14.0))
    out.truncate(0)
    rich.Console(file=out, width=100).print(frame(early))
    assert "<100 ms" in out.getvalue() and "50.0 ms" not in out.getvalue()  # a first bucket tells nothing apart
    assert bars([0, 1, 2])[::2] == "▁█"
    assert [duration(each) for each in (0.0123, 0.5, 2.5, 75)] == ["12.3 ms", "500 ms", "2.50 s", "75 s"]


def test_top_once(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    with FakeServer() as server:
        assert run(["top", "--once", "--interval", "0.1", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert server.url in shown and "workers: told to this machine's user" in shown


def test_who_is_told_nothing_of_workers_does_not_ask_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    from quire.cli.top_frame import View

    asked: list[str] = []
    answer = Api.read
    monkeypatch.setattr(Api, "read", lambda self, path, limit: asked.append(path) or answer(self, path, limit))
    with FakeServer() as server:
        view = View(server.url)
        for _ in range(3):
            top.read(Api(server.url, None), view)
    assert asked.count("/metrics") == 3 and asked.count("/server_info") == 1 and view.hint == top.NOT_TOLD


def test_top_refuses_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["top", "--once", "--url", "http://127.0.0.1:1"]) == 1
    assert "is `quire serve` running?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(["top", "--interval", "0"])
    assert "'0' is not a number of seconds from 0.1 to 3600" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    with pytest.raises(top.CommandError, match=r"needs a package: pip install 'quire\[cli\]'"):
        top.top(make_parser("top").parse_args(["top"]))
