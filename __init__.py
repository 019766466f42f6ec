"""quire: a server for large language models made of small processes.

Public names load lazily (PEP 562), so that importing one service never imports another's libraries:
``from quire import LLM, SamplingParams``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from .client.engine import Engine
    from .client.llm import LLM
    from .client.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from .proto.params import RequestOutputKind, SamplingParams
    from .proto.structured import GuidedDecodingParams, StructuredOutputsParams

__version__ = "0.1.0"

_HOMES = {
    "Engine": ".client.engine",
    "LLM": ".client.llm",
    "BeamSearchOutput": ".client.beams",
    "BeamSearchParams": ".client.beams",
    "BeamSearchSequence": ".client.beams",
    "GuidedDecodingParams": ".proto.structured",
    "Logprob": ".client.outputs",
    "StructuredOutputsParams": ".proto.structured",
    "CompletionOutput": ".client.outputs",
    "RequestMetrics": ".client.outputs",
    "RequestOutput": ".client.outputs",
    "RequestOutputKind": ".proto.params",
    "SamplingParams": ".proto.params",
}

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Engine",
    "GuidedDecodingParams",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
