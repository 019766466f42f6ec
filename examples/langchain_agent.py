"""LangChain's class for OpenAI, and an agent's loop with two tools by it.

    quire serve &
    python examples/langchain_agent.py "what is the weather in Paris?"

With `--stream` the messages are put together from their chunks.
"""

from __future__ import annotations

import argparse
from typing import Any

from functions import FUNCTIONS, needs

try:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
except ImportError:
    needs("langchain-openai")

TOOLS = {name: tool(function) for name, function in FUNCTIONS.items()}


def answer(model: ChatOpenAI, question: str, stream: bool = False, most: int = 5) -> str:
    """The answer to ``question``, after at most ``most`` turns with tools."""
    caller = model.bind_tools(list(TOOLS.values()))
    messages: list[Any] = [HumanMessage(question)]
    for _ in range(most):
        if stream:
            first, *rest = caller.stream(messages)
            message: Any = sum(rest, first)
        else:
            message = caller.invoke(messages)
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append(TOOLS[call["name"]].invoke(call))
            print(f"  {call['name']}({call['args']}) -> {messages[-1].content}")
    return str(messages[-1].content)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="-")
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args(argv)
    model = ChatOpenAI(base_url=options.url, api_key=options.api_key, model=options.model, temperature=0)
    for question in options.questions:
        print(question)
        print(" ", answer(model, question, options.stream))


if __name__ == "__main__":
    main()
