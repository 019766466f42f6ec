"""What frontends on one port have measured: told by any, never less than before, and kept of those that have ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.frontend import shared_figures
from quire.frontend.metrics import Metrics
from quire.frontend.shared_figures import SharedFigures


class Frontend:
    """As much of one as /metrics needs."""

    def __init__(self, folder: Path) -> None:
        self.figures = Metrics("m", "quire")
        self.shared = SharedFigures(folder, self.figures)

    def work(self) -> None:
        self.figures.finished("stop")
        self.figures.failed(429)
        self.figures.pooled(3, 0.5)
        self.figures.http.answered("/v1/completions", "POST", 200, 0.5)

    def scrape(self) -> str:
        return self.figures.with_others(asyncio.run(self.shared.others())).render(None).decode()


def told(text: str, times: int) -> bool:
    """Every kind of figure says that ``Frontend.work`` was called so often."""
    return all(
        line in text
        for line in (
            f'quire:request_success_total{{finished_reason="stop",model_name="m"}} {2 * times}.0\n',
            f'quire:http_errors_total{{model_name="m",status="429"}} {times}.0\n',
            f'quire:request_prompt_tokens_bucket{{le="5.0",model_name="m"}} {times}.0\n',
            f'quire:request_prompt_tokens_sum{{model_name="m"}} {3.0 * times}\n',
            f'http_requests_total{{handler="/v1/completions",method="POST",status="2xx"}} {times}.0\n',
            f'http_request_duration_seconds_count{{handler="/v1/completions",method="POST"}} {times}.0\n',
        )
    )


def test_each_tells_the_sum_and_what_another_has_told_before(tmp_path: Path) -> None:
    one, other = Frontend(tmp_path / "figures"), Frontend(tmp_path / "figures")
    for count in (1, 2, 3):
        one.work()
        assert told(one.scrape(), count)
        assert told(other.scrape(), count)  # at once: what a scrape has told is there for the next
    other.work()
    assert told(other.scrape(), 4)
    assert told(one.scrape(), 4) and told(one.scrape(), 4)  # telling it counts nothing


def test_what_ended_processes_measured_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [Frontend(tmp_path) for _ in range(3)]
    for each in ended:
        each.work()
        each.scrape()
    monkeypatch.setattr(shared_figures, "_lives", lambda pid: False)
    rest = Frontend(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["gone", "lock"] and told(rest.scrape(), 3)
    monkeypatch.setattr(shared_figures, "_lives", lambda pid: True)
    assert told(Frontend(tmp_path).scrape(), 3)


def test_a_file_that_was_added_up_and_not_removed_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frontend was killed between the two, or a scrape has read the file before it went."""
    ended = Frontend(tmp_path)
    ended.work()
    ended.scrape()
    monkeypatch.setattr(shared_figures, "_lives", lambda pid: False)
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok: None)
    for _ in range(2):
        assert told(Frontend(tmp_path).scrape(), 1)


def test_what_cannot_be_read_is_left_aside(tmp_path: Path) -> None:
    (tmp_path / "1-other-version").write_text('{"histograms": 3}')
    (tmp_path / "gone").write_text("half a fi")
    one = Frontend(tmp_path)
    one.work()
    assert told(one.scrape(), 1)
