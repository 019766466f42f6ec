"""A line of the log can hold no control character."""

import io
import json
import logging
import os
import re

from quire.client.supervisor.child import LINE_BYTES, JsonLines
from quire.proto.log_lines import JsonFormatter, LineFormatter, printable
from quire.proto.process import complain
from quire.proto.request_name import about

NASTY = "a\nFORGED line\r\x1b[31m\x00\x85\u2028\u202e\x9b b\tc \ud800 ä 漢"
SHOWN = r"a\nFORGED line\r\x1b[31m\x00\x85\u2028\u202e\x9b b\tc \ud800 ä 漢"


def logged(log: str, *args: object, **options: object) -> str:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(LineFormatter("TIME %(levelname).1s %(message)s"))
    logger = logging.Logger("nobody")
    logger.addHandler(handler)
    logger.error(log, *args, **options)
    return out.getvalue()


def test_what_a_client_wrote_stays_on_its_line():
    assert printable(NASTY) == SHOWN
    assert logged("it said %s", NASTY) == f"TIME E it said {SHOWN}\n"
    assert logged("plain %d", 3) == "TIME E plain 3\n"


def test_a_traceback_cannot_pass_for_a_record():
    try:
        raise ValueError("x\nTIME E all is well\x1b[0m")
    except ValueError as error:
        first, *rest = logged("it failed: %s", error, exc_info=error).splitlines()
    assert first == r"TIME E it failed: x\nTIME E all is well\x1b[0m"
    assert len(rest) > 3 and all(line.startswith("  | ") for line in rest)
    assert not re.search("[\x00-\x1f]", "".join(rest))


def test_what_a_process_dies_of_is_one_line(capsys):
    complain("quire: error", "a\n b\x1b[2J")
    assert capsys.readouterr().err == "quire: error: a b\\x1b[2J\n"


def test_the_log_as_json(capsys):
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter("scheduler"))
    logger = logging.Logger("nobody")
    logger.addHandler(handler)
    logger.warning("it said %s to gpu_worker-%s", NASTY, "0123456789abcdef" * 2)
    try:
        raise ValueError("x\ny")
    except ValueError as error:
        logger.error("it failed", exc_info=error, extra=about(5 << 32 | 7))
    assert out.getvalue().isascii()
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert set(first) == {"time", "level", "process", "pid", "message"}
    assert first["message"] == f"it said {SHOWN} to gpu_worker-01234567" and first["pid"] == os.getpid()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert (second["level"], second["request_id"]) == ("error", "5-7")
    assert second["exception"].endswith("ValueError: x\ny")
    assert logged("it failed", extra=about(5 << 32 | 7)) == "TIME E it failed [request 5-7]\n"


def test_what_a_child_prints_becomes_json():
    told, form = [], JsonLines("gpu_worker", 7)
    for data in (b'{"time": "now"}\nplain \x1b[1m', b"text\n\nbar 1%\rbar 2%\r", b"x" * (LINE_BYTES + 1), b"end"):
        told += form(data).splitlines()
    told += form(b"", last=True).splitlines()
    ours, *others = (json.loads(line) for line in told)
    assert ours == {"time": "now"}
    messages = [r"plain \x1b[1mtext", "bar 1%", "bar 2%", "x" * (LINE_BYTES + 1), "end"]
    assert [each["message"] for each in others] == messages
    assert {(each["process"], each["pid"]) for each in others} == {("gpu_worker", 7)}
