"""An agent with two tools by Ollama's own package, to which quire is another Ollama.

    quire serve --port 11434 &
    python examples/ollama_agent.py "what is the weather in Paris?"

With `--stream` the messages are put together from their pieces.
"""

from __future__ import annotations

import argparse
from typing import Any

from functions import FUNCTIONS, call, needs

try:
    import ollama
except ImportError:
    needs("ollama")


def ask(client: ollama.Client, asked: dict[str, Any], stream: bool) -> Any:
    """The assistant's next message."""
    if not stream:
        return client.chat(**asked).message
    message = ollama.Message(role="assistant", content="", tool_calls=[])
    for piece in client.chat(**asked, stream=True):
        message.content += piece.message.content or ""
        message.tool_calls += piece.message.tool_calls or []
    return message


def answer(client: ollama.Client, model: str, question: str, stream: bool = False, most: int = 5) -> str:
    """The answer to ``question``, after at most ``most`` turns with tools."""
    messages: list[Any] = [{"role": "user", "content": question}]
    asked = {"model": model, "messages": messages, "tools": list(FUNCTIONS.values()), "options": {"temperature": 0}}
    for _ in range(most):
        message = ask(client, asked, stream)
        messages.append(message)
        if not message.tool_calls:
            break
        for each in message.tool_calls:
            result = call(each.function.name, dict(each.function.arguments))
            messages.append({"role": "tool", "tool_name": each.function.name, "content": result})
    return str(messages[-1].content or "")


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--url", default="http://localhost:11434")
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args(argv)
    client = ollama.Client(options.url)
    for question in options.questions:
        print(question)
        print(" ", answer(client, options.model, question, options.stream))


if __name__ == "__main__":
    main()
