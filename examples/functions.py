"""What the agents of these examples can do, and how an example says that a package is missing."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def get_weather(city: str) -> dict[str, Any]:
    """Get the weather in a city"""
    return {"temperature": sum(map(ord, city)) % 30, "sky": "sunny"}


def set_timer(minutes: int) -> dict[str, Any]:
    """Set a timer in minutes"""
    return {"ok": minutes > 0}


FUNCTIONS = {"get_weather": get_weather, "set_timer": set_timer}


def call(name: str, arguments: dict[str, Any]) -> str:
    """Call one of them and tell what came of it, as JSON; what a model may get wrong is an ``error``."""
    try:
        result = FUNCTIONS[name](**arguments)
    except (KeyError, TypeError) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(f"  {name}({arguments}) -> {result}")
    return json.dumps(result)


def needs(package: str) -> NoReturn:
    """End, and say what to install."""
    raise SystemExit(f"this example needs a package: pip install {package}")
