"""What adapter_config.json may say: patterns that are matched as PEFT does, and fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_folders import adapter_folder

from quire.proto.checkpoint.lora_config import MAX_PATTERN, MAX_PATTERNS, read_adapter_config
from quire.proto.config import ConfigError

NAME = "model.layers.12.self_attn.q_proj"
MATCHED = [
    "q_proj", "self_attn.q_proj", r"layers\.12\.self_attn\.q_proj", r".*\.q_proj", "(q_proj|v_proj)", "q_proj|v_proj",
    r"layers\.(?:11|12)\..*\.(q|k)_proj", r"layers\.\d+\.self_attn.q_proj", r"[0-9]+\.self_attn\.q_proj",
    "^model.*q_proj", r"layers\.\d+\.self_\w+\.q_proj",
]  # fmt: skip
REFUSED = [
    "(a?){30}b", "a?" * 40, "(a|a)(a|a)(a|a)b", "((a|b)|(a|b))", ".*.*.*q", "(a+)+b", "a*", "a{9}", "(.*)*", ".*?",
    "(?=a)", r"(a)\1", "x" * (MAX_PATTERN + 1), "[^a]*", "(" * 5000 + ")" * 5000, "a{99999999999}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", MATCHED)
def test_what_is_matched(tmp_path: Path, pattern: str) -> None:
    config = read_adapter_config(adapter_folder(tmp_path, rank_pattern={pattern: 3}))
    assert (config.rank_of(NAME), config.rank_of(NAME.replace("q_proj", "o_proj"))) == (3, 8)


@pytest.mark.parametrize("pattern", REFUSED)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_what_may_take_long_is_refused(tmp_path: Path, key: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match="repeats too often"):
        read_adapter_config(adapter_folder(tmp_path, **{key: {pattern: 3}}))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"rank_pattern": {f"q{n}": 1 for n in range(MAX_PATTERNS + 1)}}, "has 1025 patterns, over 1024"),
        ({"rank_pattern": {f".*q{n}": 1 for n in range(65)}}, "over 64 patterns with"),
        ({"rank_pattern": {"a)(b": 1}}, "no regular expression"),
        ({"rank_pattern": {"[z-a]": 1}}, "no regular expression"),
        ({"lora_alpha": 10**400}, "lora_alpha is"),
        ({"alpha_pattern": {"q": -(10**400)}}, "alpha_pattern is"),
    ],
)
def test_other_limits(tmp_path: Path, said: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_adapter_config(adapter_folder(tmp_path, **said))
