"""The documents name only what there is: files, links, headings, flags, environment variables, metrics."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = tuple(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
SUFFIX = re.compile(r"\.(py|md|txt|toml|ya?ml|json|log|jinja|example|target|service)$")
NOT_OURS = frozenset(
    {
        # of a model's folder
        "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
        "quantize_config.json", "quant_config.json", "hf_quant_config.json",
        "adapter_config.json",
        "chat_template.jinja", "modules.json", "config_sentence_transformers.json", "1_Pooling/config.json",
        # of the reader's, in examples; of others
        "my_rules.py", "compose.override.yaml", "modeling_granite.py", "report.log",
        "bench/results/gpu-PART.json",  # nobody has run it yet
        # of a pull request that adds a family: a pattern
        "tiny_*.py",
    }
)  # fmt: skip
FOREIGN_FLAGS = frozenset(
    {
        "--scale", "--profile", "--build-arg", "--no-deps", "--wait", "--now",  # docker, systemctl
        "--stat",  # git
        "--unix-socket",  # curl
        "--index-url",  # pip
    }
)  # fmt: skip


def prose(page: Path) -> str:
    return page.read_text("utf-8")


@cache
def tree() -> frozenset[str]:
    """Every path of ours, whole and without its first folders: ``scheduler/fake/fake_model.py``, ``fake_model.py``."""
    found = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if "__pycache__" not in path.parts:
                parts = path.relative_to(ROOT).parts
                found.update("/".join(parts[at:]) for at in range(len(parts)))
    return frozenset(found | {path.name for path in ROOT.iterdir()})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    missing = []
    inside = rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./*-]*\w/?"  # of commands and sentences
    for name in [*re.findall(r"`([\w./*-]+)`", prose(page)), *re.findall(inside, prose(page))]:
        folder = name.endswith("/")
        if name in NOT_OURS or name.startswith(("/", "~")) or not (SUFFIX.search(name) or folder):
            continue
        if "*" in name:
            ours = any(ROOT.glob(name)) or any(ROOT.rglob(name))
        else:
            ours = name.rstrip("/") in tree() or (page.parent / name).exists()
        if not ours:
            missing.append(name)
    assert missing == []


def slug(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        at = (page.parent / path).resolve() if path else page
        assert at.exists(), target
        if anchor:
            assert anchor in {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose(at), re.M)}, target


@cache
def sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return [path for path in found if path != Path(__file__).resolve()]


@cache
def flags() -> frozenset[str]:
    """Every flag that our parsers, our scripts and our tests define, in both forms of those that are true or false."""
    text = "\n".join(path.read_text("utf-8") for path in sources())
    found = set(re.findall(r"[\"'](--[a-z][\w-]*)[\"'=]", text))
    from quire.cli.chat_settings import SETTINGS
    from quire.proto.config import EngineArgs
    from quire.proto.vllm_flags import HONOURED, rows

    found |= {f"--{name}" for name in [*HONOURED, *(row.name for row in rows())]}
    found |= {f"--{name.replace('_', '-')}" for name in SETTINGS}
    for name in EngineArgs.__dataclass_fields__:
        flag = name.replace("_", "-")
        found |= {f"--{flag}", f"--no-{flag}"}
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_are_named_exist(page: Path) -> None:
    named = {flag.rstrip("-") for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", prose(page))}
    assert sorted(flag for flag in named if flag.replace("_", "-") not in flags() | FOREIGN_FLAGS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_and_variables_that_are_named_exist(page: Path) -> None:
    text = "\n".join(path.read_text("utf-8") for path in (*sources(), ROOT / ".env", ROOT / "compose.yaml"))
    named = set(re.findall(r"\b(QUIRE_[A-Z_]+)\b|\b(test_\w+)\b(?!\.py)", prose(page)))
    assert sorted(name for pair in named for name in pair if name not in text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_holds_two_versions_of_its_lines(page: Path) -> None:
    assert re.findall(r"^(?:<{7} |>{7} |={7}$).*", prose(page), re.M) == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_reference_page_begins_with_prose_and_a_command(page: Path) -> None:
    """What it is for, in words, and something to type, before any table, picture or heading below the title."""
    title, *lines = prose(page).splitlines()[:25]
    first = next(line for line in lines if line.strip())
    assert title.startswith("# "), title
    assert not re.match(r"#|\||```|!\[|<!--|>|[*+-] |\d+[.)] ", first), f"begins with no prose: {first!r:.80}"
    assert any(re.match(r"```|.*`(?:quire|python|curl|pip|docker|kubectl) [^`]+`", line) for line in lines), (
        "the first 25 lines have no command and no block of code"
    )


def test_the_site_has_every_page() -> None:
    """What mkdocs would refuse, before it is built."""
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    made = {name for name in listed if name.startswith("reference/")}  # of the code, by docs/site/hooks.py
    assert len(listed) == len(set(listed)) and set(listed) - made == pages


def test_metrics_that_are_named_exist() -> None:
    source = "".join((ROOT / folder / "metrics.py").read_text("utf-8") for folder in ("frontend", "client/offline"))
    named = {name for page in PAGES for name in re.findall(r"(?:quire|vllm):([a-z_]+[a-z])", prose(page))}
    assert len(named) > 12
    assert sorted(name for name in named if name.removesuffix("_total") not in source) == []
