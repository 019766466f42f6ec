"""A turn as Claude Code takes it: tools over /v1/messages, streamed, by the `anthropic` package.

    quire serve --served-model-name claude-sonnet-4-5 quire-demo &
    python examples/claude_tools.py "what is the weather in Paris?"

What the conversation costs is asked first (count_tokens). The model's thoughts, texts and calls are printed as they
come, in blocks; the result of each call goes back as a tool_result, until a turn calls nothing. `--think` asks for
thoughts, of a model that has them.
"""

from __future__ import annotations

import argparse
from typing import Any

from functions import call, needs

try:
    import anthropic
except ImportError:
    needs("anthropic")

TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {
        "name": "set_timer",
        "description": "Set a timer in minutes",
        "input_schema": {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]},
    },
]


def turn(client: anthropic.Anthropic, asked: dict[str, Any]) -> Any:
    """The model's next message, printed while it comes."""
    with client.messages.stream(**asked) as stream:
        for event in stream:
            if event.type == "content_block_start":
                block = event.content_block
                print(f"  [{block.type}{' ' + block.name if block.type == 'tool_use' else ''}] ", end="")
            elif event.type == "content_block_delta":
                delta: Any = event.delta
                kind = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                print(getattr(delta, kind.get(delta.type, ""), ""), end="", flush=True)
            elif event.type == "content_block_stop":
                print()
        return stream.get_final_message()


def results(message: Any) -> list[dict[str, Any]]:
    """What came of the calls of a message, as blocks of the next one."""
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": call(block.name, block.input)}
        for block in message.content
        if block.type == "tool_use"
    ]


def answer(client: anthropic.Anthropic, model: str, question: str, think: bool = False, most: int = 5) -> str:
    """The answer to ``question``, after at most ``most`` turns with tools."""
    messages: list[Any] = [{"role": "user", "content": question}]
    asked: dict[str, Any] = {"model": model, "tools": TOOLS, "messages": messages}
    print(f"  {client.messages.count_tokens(**asked).input_tokens} tokens to read")
    asked["max_tokens"] = 1500 if think else 200
    if think:
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    else:
        asked["extra_body"] = {"temperature": 0}  # newer versions of the package have no argument for it
    said = ""
    for _ in range(most):
        message = turn(client, asked)
        messages.append({"role": "assistant", "content": message.content})
        said = "".join(block.text for block in message.content if block.type == "text")
        if message.stop_reason != "tool_use":
            break
        messages.append({"role": "user", "content": results(message)})
    return said


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--api-key", default="-")
    parser.add_argument("--model", default="claude-sonnet-4-5")
    parser.add_argument("--think", action="store_true")
    options = parser.parse_args(argv)
    client = anthropic.Anthropic(base_url=options.url, api_key=options.api_key, auth_token=None)
    for question in options.questions:
        print(question)
        print(" ", answer(client, options.model, question, options.think))


if __name__ == "__main__":
    main()
