"""docs/http.md tells every route, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

from quire.frontend.app import make_app
from quire.frontend.fake import FakeEngine
from quire.frontend.front import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http.md"


def test_the_table_of_routes_is_that_of_the_server() -> None:
    app = make_app(FakeEngine(), Settings(names=["m"], admin_api_key="k"))
    there = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    rows = re.findall(r"^\| ([A-Z, *]+) \| `(/[^`]*)` \| ([^|]+) \|", PAGE.read_text("utf-8"), re.M)
    told = [(method.strip(), path) for methods, path, _ in rows for method in methods.split(",")]
    assert len(told) == len(set(told)), "a route has two rows"
    assert sorted(there - set(told)) == [], "docs/http.md lacks a row"
    assert sorted(set(told) - there) == [], "docs/http.md has a row of a route that is not there"
