"""What Ollama's dialect says of models: /api/tags, /api/show, /api/ps, /api/version; and what is not done over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from ...client.results import RequestError
from ...proto.version import __version__
from ..auth import may_see
from ..calls import json_body
from ..errors import ApiError
from ..front import FRONT, LATEST
from ..model_card import ModelCard
from .ollama_schema import ShowRequest

SPOKEN = "0.13.0"
"""The version of Ollama whose API this is; clients compare it with the one they need."""
_NEVER = "9999-12-31T23:59:59Z"
_OF_CONFIG = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}  # fmt: skip
"""Names of ``model_info``, after the architecture's, and of config.json."""
_PARAMETERS = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}


async def tags(request: web.Request) -> web.Response:
    """Every model that may be asked for."""
    return json_body({"models": await _listed(request)})


async def running(request: web.Request) -> web.Response:
    """The same, where they are loaded: none before the first worker is ready."""
    front = request.app[FRONT]
    if not front.engine.ready:
        return json_body({"models": []})
    try:
        stats = await front.engine.stats(front.settings.stats_s)
        on_cpu = all(replica.device.startswith("cpu") for replica in stats.replicas)
    except (ApiError, RequestError, TimeoutError):
        on_cpu = False
    more = {"expires_at": _NEVER, "context_length": front.engine.max_model_len}
    listed = await _listed(request)
    return json_body({"models": [{**model, **more, "size_vram": 0 if on_cpu else model["size"]} for model in listed]})


async def _listed(request: web.Request) -> list[dict[str, Any]]:
    front = request.app[FRONT]
    card = await front.card()
    names = [(name, "") for name in front.settings.names]
    names += [(entry.name, entry.parent or front.settings.names[0]) for entry in front.engine.adapters]
    return [_entry(name, parent, card) for name, parent in names if may_see(request, name)]


def _entry(name: str, parent: str, card: ModelCard) -> dict[str, Any]:
    full = name if ":" in name.rpartition("/")[2] else name + LATEST
    return {
        "name": full,
        "model": full,
        "modified_at": _time(card.modified),
        "size": card.size,
        "digest": card.digest,
        "details": _details(card, parent),
    }


def _details(card: ModelCard, parent: str) -> dict[str, Any]:
    return {
        "parent_model": parent,
        "format": card.format,
        "family": card.family,
        "families": [card.family],
        "parameter_size": card.parameter_size,
        "quantization_level": card.quantization,
    }


async def show(request: web.Request) -> web.Response:
    """All that is known of one model."""
    front = request.app[FRONT]
    asked = await front.read(request, ShowRequest, any_type=True)
    name = await front.find_model(request, front.known(asked.model))
    entry = next((each for each in front.engine.adapters if each.name == name), None)
    parent = "" if entry is None else entry.parent or front.settings.names[0]
    card, settings = await front.card(), front.settings
    parameters = [f"{_PARAMETERS.get(key, key):<30} {value}" for key, value in settings.defaults.items()]
    embeds = settings.pooler is not None and "embed" in settings.pooler.tasks
    capabilities = ["completion"] if settings.pooler is None else ["embedding"] if embeds else []
    capabilities += ["tools"] if settings.tool_parser is not None else []
    capabilities += ["thinking"] if settings.reasoning_parser is not None else []
    family = card.family or "unknown"
    info = {"general.architecture": family, "general.parameter_count": card.parameters or None}
    info |= {f"{family}.{key}": card.hf[own] for key, own in _OF_CONFIG.items() if card.hf.get(own) is not None}
    return json_body(
        {
            "license": card.license,
            "modelfile": f"FROM {parent or name}\n",
            "parameters": "\n".join(parameters),
            "template": card.template if settings.tokenizer is not None else "",
            "details": _details(card, parent),
            "model_info": {**info, f"{family}.context_length": front.engine.max_model_len or None},
            "capabilities": capabilities,
            "modified_at": _time(card.modified),
        }
    )


async def version(request: web.Request) -> web.Response:
    """The version of Ollama that clients may take this server for, and its own."""
    return json_body({"version": SPOKEN, "quire": __version__})


async def alive(request: web.Request) -> web.Response:
    """Ollama's command asks so whether anybody is there. A page at / would answer it too."""
    return web.Response()


async def not_here(request: web.Request) -> web.Response:
    """What changes the models of a server."""
    raise ApiError(
        403, f"{request.path} is not possible here: a server has the model that it was started with; start another one "
        "with `quire serve MODEL`.",
    )  # fmt: skip


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


MODEL_ROUTES = [
    web.get("/api/tags", tags), web.get("/api/ps", running), web.post("/api/show", show),
    web.get("/api/version", version), web.head("/", alive), web.delete("/api/delete", not_here),
    *[web.post(f"/api/{what}", not_here) for what in ("pull", "push", "create", "copy")],
]  # fmt: skip
