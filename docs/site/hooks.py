"""What mkdocs does not do by itself: pages made from the code, links out of ``docs/``, lists as on GitHub."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^ *(```|~~~)")
ITEM = re.compile(r"^(\*|-|\d+\.) ")


def github_anchor(heading: str, separator: str) -> str:
    """The anchor that GitHub gives a heading: the links in the pages are written for it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", separator)


def on_config(config: Any) -> Any:
    """Anchors as GitHub's."""
    config.mdx_configs["toc"]["slugify"] = github_anchor
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the reference, and every file outside of ``docs/`` that a page links to."""
    sys.path.insert(0, str(Path(__file__).parent))  # mkdocs runs this file without its folder in the path
    import reference

    for name, text in reference.pages():
        files.append(File.generated(config, name, content=text))
    for page in files.documentation_pages():
        for target in outside(page.content_string, page.src_uri):
            if files.get_file_from_path(f"files/{target}") is None:
                files.append(File.generated(config, f"files/{target}", abs_src_path=str(ROOT / target)))
    return files


def outside(text: str, page: str) -> list[str]:
    """The files of the repository outside of ``docs/`` that a page links to, from the root."""
    found = []
    for match in OUTSIDE.finditer(text):
        path = (ROOT / "docs" / page).parent.joinpath(match[1]).resolve()
        if path.is_file() and not path.is_relative_to(ROOT / "docs") and path.suffix != ".md":
            found.append(path.relative_to(ROOT).as_posix())
    return found


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the repository lead to their copies; links to its folders and to its own pages become text."""
    at = page.file.src_uri
    up = "../" * at.count("/")

    def link(match: re.Match[str]) -> str:
        path = (ROOT / "docs" / at).parent.joinpath(match[2]).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return match[0]
        if path.is_file() and path.suffix != ".md":
            return f"[{match[1]}]({up}files/{path.relative_to(ROOT).as_posix()})"
        return match[1] if match[1].startswith("`") else f"{match[1]} (`{path.relative_to(ROOT).as_posix()}`)"

    markdown = re.sub(r"\[([^\]]+)" + OUTSIDE.pattern, link, markdown)
    return lists_apart(markdown)


def lists_apart(markdown: str) -> str:
    """GitHub begins a list without an empty line before it; Python-Markdown asks for one."""
    lines: list[str] = []
    fenced = False
    for line in markdown.split("\n"):
        fenced ^= bool(FENCE.match(line))
        before = lines[-1] if lines else ""
        if not fenced and ITEM.match(line) and before.strip() and not ITEM.match(before) and before[0] not in " |":
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
