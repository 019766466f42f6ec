"""GET / and its files: whole, small, public where all else asks for a key, under a policy that runs nothing else."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest
from http_asks import ask, ask_bytes

from quire.frontend.fake import FakeServer
from quire.frontend.page.serving import FOLDER, TYPES

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(file for file in FOLDER.rglob("*") if file.suffix in TYPES)
MOST_LINES = 3000
LINKS = re.compile(r"""(?:src|href)="([^"#]+)"|(?:\bfrom |\bimport\(?)\s*"(\.[^"]+)\"""")


def test_the_page_is_open_where_the_rest_asks_for_a_key() -> None:
    with FakeServer(api_key="k") as server:
        status, body, headers = ask_bytes(server, "GET", "/")
        assert (status, headers.get_content_type()) == (200, "text/html") and b"<title>quire</title>" in body
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-cache"
        for method, path in (("POST", "/"), ("HEAD", "/"), ("GET", "/v1/models"), ("POST", "/page/app.js")):
            assert ask(server, method, path, {} if method == "POST" else None)[0] == 401, (method, path)
        assert ask(server, "GET", "/page/app.js")[0] == 200
        for stray in ("/page/serving.py", "/page/../gate.py", "/page/%2e%2e/gate.py", "/page/none.js"):
            assert ask(server, "GET", stray)[0] in (401, 404), stray


def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    with FakeServer() as server:
        tag = ask_bytes(server, "GET", "/page/app.js")[2]["ETag"]
        status, body, _ = ask_bytes(server, "GET", "/page/app.js", headers={"If-None-Match": tag})
        assert (status, body) == (304, b"")
        assert ask_bytes(server, "GET", "/page/app.js", headers={"If-None-Match": '"other"'})[0] == 200


def test_below_a_root_path_the_page_names_its_files_there() -> None:
    with FakeServer(root_path="/llm") as server:
        body = ask_bytes(server, "GET", "/llm/")[1].decode()
        assert 'src="/llm/page/app.js"' in body and '="page/' not in body
        assert ask(server, "GET", "/llm/page/app.js")[0] == 200


def test_without_the_page_there_is_none() -> None:
    with FakeServer(page=False) as server:
        assert ask(server, "GET", "/")[0] == 405 and ask(server, "GET", "/page/app.js")[0] == 404
        assert ask(server, "HEAD", "/")[0] == 200


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(FOLDER).as_posix())
def test_what_a_file_names_is_in_the_wheel(file: Path) -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"]
    packed = data["quire.frontend.page"]
    assert any(fnmatch.fnmatch(file.relative_to(FOLDER).as_posix(), pattern) for pattern in packed)
    text = file.read_text("utf-8")
    for link, module in LINKS.findall(text):
        if link:
            assert link.startswith("page/") or link == "docs", f"{link} is from elsewhere"
        named = FOLDER / link.removeprefix("page/") if link else (file.parent / module)
        assert named.is_file() or link == "docs", f"{file.name} names {link or module}"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r"https?://(?!www\.w3\.org/)", text), "an address outside this server"


def test_the_page_stays_small() -> None:
    assert sum(len(file.read_text("utf-8").splitlines()) for file in FILES) <= MOST_LINES
