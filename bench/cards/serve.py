"""Serving over HTTP on the card: an 8B shape with dummy weights, TTFT, ITL and tokens/s by requests open."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..load import Load
from ..machine import ROOT
from ..models import make_tokenizer, prompt_ids
from ..serving import measure_load
from ..sides import Server, quire
from .card import Card, Row
from .floor import SERVED, TINY

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
LOADS = ((2, (8, 16)), (1, (32, 256)), (8, (32, 256)), (64, (32, 256)), (4, (1200, 1800)))
"""Requests open, and tokens in a prompt. The first is of a dry run."""


def rows(card: Card) -> Iterator[Row]:
    """One server for all loads, after a warm-up that is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        model = _make_model(card, Path(folder) / "llama-8b")
        flags = ["--load-format=dummy", *card.few(["--device=cpu"], [])]
        with Server(quire(flags), model, "auto") as server:
            yield {"load": "start"}, {"ready_s": server.start_seconds}
            for width, inputs in card.few(LOADS[:1], LOADS[1:]):
                load = Load(
                    "127.0.0.1", server.port, model.name, width, seconds=card.few(2.0, 15.0), ids=prompt_ids(model),
                    inputs=inputs, outputs=card.few((4, 8), (64, 128)),
                )  # fmt: skip
                yield {"concurrency": width, "prompt": f"{inputs[0]}-{inputs[1]}"}, measure_load(load, server.pid, {})


def _make_model(card: Card, folder: Path) -> Path:
    """A folder with a config and a tokenizer in which every id has text."""
    folder.mkdir()
    if card.dry:
        for name in TOKENIZER:
            shutil.copy(ROOT / "demo_model" / name, folder)
        vocab = json.loads((ROOT / "demo_model" / "config.json").read_text())["vocab_size"]
        config = TINY | {"vocab_size": vocab, "max_position_embeddings": 2048}
    else:
        config = SERVED
        make_tokenizer(config["vocab_size"], folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
