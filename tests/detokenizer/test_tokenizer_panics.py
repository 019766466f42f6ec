"""A file that makes Rust panic ends in one line, as any other file that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.detokenizer.tokenizer import load_tokenizer
from quire.proto.config import ConfigError
from quire.proto.rust import no_panics


def test_a_charsmap_that_is_none_is_told_by_its_file(tmp_path: Path) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "normalizer": normalizer, "model": model}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read: .*download it again") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_what_is_no_panic_goes_through() -> None:
    with pytest.raises(KeyboardInterrupt), no_panics():
        raise KeyboardInterrupt
