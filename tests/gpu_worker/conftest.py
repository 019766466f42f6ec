"""What several files of the worker's tests start from."""

import json

import pytest
from worker_fakes import TINY_LLAMA


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with the config of a tiny Llama and no weights (``--load-format=dummy``)."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder
