"""LlamaIndex's class for servers that are like OpenAI's, and an agent's loop with two tools by it.

    quire serve &
    python examples/llama_index_agent.py "what is the weather in Paris?"

With `--stream` the messages are put together from their chunks.
"""

from __future__ import annotations

import argparse
from typing import Any

from functions import FUNCTIONS, call, needs

try:
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike
except ImportError:
    needs("llama-index-llms-openai-like")

TOOLS = {name: FunctionTool.from_defaults(function) for name, function in FUNCTIONS.items()}


def answer(model: OpenAILike, question: str, stream: bool = False, most: int = 5) -> str:
    """The answer to ``question``, after at most ``most`` turns with tools."""
    messages = [ChatMessage(role="user", content=question)]
    for _ in range(most):
        asked: dict[str, Any] = {"tools": list(TOOLS.values()), "chat_history": messages}
        if stream:
            *_, found = model.stream_chat_with_tools(**asked)  # each has all that came so far
        else:
            found = model.chat_with_tools(**asked)
        messages.append(found.message)
        calls = model.get_tool_calls_from_response(found, error_on_no_tool_call=False)
        if not calls:
            break
        for each in calls:
            result, id = call(each.tool_name, each.tool_kwargs), {"tool_call_id": each.tool_id}
            messages.append(ChatMessage(role="tool", content=result, additional_kwargs=id))
    return str(messages[-1].content or "")


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="-")
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args(argv)
    model = OpenAILike(
        api_base=options.url, api_key=options.api_key, model=options.model, temperature=0.0, context_window=2048,
        is_chat_model=True, is_function_calling_model=True,
    )  # fmt: skip
    for question in options.questions:
        print(question)
        print(" ", answer(model, question, options.stream))


if __name__ == "__main__":
    main()
