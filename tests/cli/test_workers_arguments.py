"""What ``quire workers`` refuses before it asks anybody."""

import pytest

from quire.cli.main import run


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "soon"])
def test_a_drain_lasts_a_number_of_seconds(timeout, capsys):
    """Else the worker would be drained all the same, with another patience than was asked for."""
    with pytest.raises(SystemExit) as caught:
        run(["workers", "drain", "0", f"--timeout={timeout}", "--scheduler=ipc:///nowhere"])
    assert caught.value.code == 2
    assert f"'{timeout}' is not a number of seconds of at least 0" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("name", "hint"), [("fronted", "did you mean frontend? name"), ("x", "'x'; name")])
def test_a_restart_names_the_services_there_are(name, hint, capsys):
    with pytest.raises(SystemExit) as caught:
        run(["restart", name])
    assert caught.value.code == 2
    assert hint + " some of scheduler, detokenizer, gpu_worker, frontend, or none for all" in capsys.readouterr().err
