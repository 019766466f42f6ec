"""The commands in the documents do what the documents say, and the documents build as a site that needs no other."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import Reader, blocks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "<!-- run" in page.read_text("utf-8")]
OUTSIDE = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^>]*>""")


@pytest.mark.skipif(shutil.which("curl") is None, reason="the pages ask with curl, which is not here")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_do_what_the_page_says(page: Path) -> None:
    reader = Reader()
    try:
        for block in blocks(page):
            reader.follow(block)
    finally:
        reader.close()


def test_the_page_of_each_of_the_ten_tasks_has_commands_that_are_run() -> None:
    table = (DOCS / "index.md").read_text("utf-8").partition("## Ten tasks")[2].partition("## ")[0]
    rows = re.findall(r"^\| (.+?) \| .*?\]\(([\w/.-]+\.md)", table, re.M)
    assert len(rows) == 10
    runs = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert [task for task, page in rows if page not in runs] == []


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs pip install 'quire[docs]'")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    made = {path.relative_to(tmp_path).as_posix(): path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    assert {"index.html", "quickstart.html", "reference/http.html", "reference/flags.html"} <= set(made)
    assert [found for text in made.values() for found in OUTSIDE.findall(text) if 'rel="canonical"' not in found] == []
    assert "ChatRequest" in made["reference/http.html"] and "--max-model-len" in made["reference/flags.html"]
