"""GET /v1/models as Anthropic tells it, to who says ``anthropic-version``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from ..calls import json_body

ANTHROPIC = "anthropic-version"
"""The header that Anthropic's clients send with everything."""


def anthropic_models(names: list[str], created: int) -> web.Response:
    """The names on one page."""
    data = [_model(name, created) for name in names]
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return json_body({"data": data, "has_more": False, **ends})


def anthropic_model(name: str, created: int) -> web.Response:
    """One of them."""
    return json_body(_model(name, created))


def _model(name: str, created: int) -> dict[str, Any]:
    told = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": told}
