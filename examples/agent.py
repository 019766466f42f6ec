"""An agent with two tools: the model calls them, is told what came of it, and answers.

    quire serve &
    python examples/agent.py "what is the weather in Paris?" "set a timer for 12 minutes"

It needs the package `openai`. With `--stream` the calls are put together from their pieces.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from functions import call, needs

try:
    import openai
except ImportError:
    needs("openai")

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "set_timer",
            "description": "Set a timer in minutes",
            "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]},
        },
    },
]


def ask(client: openai.OpenAI, messages: list[Any], stream: bool) -> dict[str, Any]:
    """The assistant's next message, with its content and its calls."""
    asked: dict[str, Any] = {"model": client.models.list().data[0].id, "messages": messages, "tools": TOOLS}
    if not stream:
        message = client.chat.completions.create(**asked, temperature=0).choices[0].message
        return message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
    content, calls = "", list[dict[str, Any]]()
    for chunk in client.chat.completions.create(**asked, temperature=0, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for piece in delta.tool_calls or ():
            assert piece.function is not None
            if piece.id:  # a call begins
                calls.append(
                    {"id": piece.id, "type": "function", "function": {"name": piece.function.name, "arguments": ""}}
                )
            calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def answer(client: openai.OpenAI, question: str, stream: bool = False, most: int = 5) -> str:
    """The answer to ``question``, after at most ``most`` turns with tools."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(most):
        message = ask(client, messages, stream)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for asked in message["tool_calls"]:
            result = call(asked["function"]["name"], json.loads(asked["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": asked["id"], "content": result})
    return str(messages[-1].get("content") or "")


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="-")
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args(argv)
    client = openai.OpenAI(base_url=options.url, api_key=options.api_key)
    for question in options.questions:
        print(question)
        print(" ", answer(client, question, options.stream))


if __name__ == "__main__":
    main()
