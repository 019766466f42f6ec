"""What other servers' clients speak, one file for each: a request becomes one of OpenAI's and goes its way, and what
comes of it is told in the dialect's own words. Each file has its ``ROUTES``, and ``refused``, its shape of an error."""

from __future__ import annotations

from aiohttp import web

from ..errors import Shapes
from . import anthropic, llama_cpp, ollama, sagemaker, tgi

_DIALECTS = (anthropic, llama_cpp, ollama, sagemaker, tgi)

ROUTES: list[web.RouteDef] = [route for dialect in _DIALECTS for route in dialect.ROUTES]
"""Every dialect's."""

SHAPES_OF: Shapes = {(route.method, route.path): dialect.refused for dialect in _DIALECTS for route in dialect.ROUTES}
"""How errors are told, by method and path."""
