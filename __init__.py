"""quire: a server for large language models made of small processes.

Public names load lazily (PEP 562), so that importing one service never imports another's libraries:
``from quire import LLM, SamplingParams``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client.engine import Engine
    from .client.llm import LLM
    from .client.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from .proto.params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "Engine": ".client.engine",
    "LLM": ".client.llm",
    "CompletionOutput": ".client.outputs",
    "RequestMetrics": ".client.outputs",
    "RequestOutput": ".client.outputs",
    "RequestOutputKind": ".proto.params",
    "SamplingParams": ".proto.params",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
