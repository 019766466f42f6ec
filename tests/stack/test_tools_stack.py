"""The demo model calls its tools, by the `openai` package: an agent's loop, and streams of calls that outlive kills."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from stack import Server

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")
CITIES = ["Paris", "Rome", "London", "Berlin", "Madrid", "Tokyo", "Oslo", "Cairo"]


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def agent():
    sys.path.insert(0, EXAMPLES)
    try:
        import agent
    finally:
        sys.path.remove(EXAMPLES)
    return agent


def ask(client, agent, question, **more):
    body = {"messages": [{"role": "user", "content": question}], "tools": agent.TOOLS, "temperature": 0, **more}
    choice = client.chat.completions.create(model="quire-demo", **body).choices[0]
    return choice.finish_reason, [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]


def test_an_agent_with_two_tools(client, agent, capsys):
    for stream in (False, True):
        assert "degrees" in agent.answer(client, "what is the weather in Paris?", stream)
        assert "get_weather({'city': 'Paris'})" in capsys.readouterr().out
        agent.answer(client, "set a timer for 12 minutes", stream)
        assert "set_timer({'minutes': 12})" in capsys.readouterr().out
    assert agent.answer(client, "What is the capital of France?") == "The capital of France is Paris."


def test_every_way_to_choose(client, agent):
    named = {"type": "function", "function": {"name": "set_timer"}}
    question = "what is the weather in Paris?"
    assert ask(client, agent, question) == ("tool_calls", [("get_weather", '{"city": "Paris"}')])
    assert ask(client, agent, question, tool_choice="none")[1] == []
    assert ask(client, agent, "hello")[0] == "stop"
    reason, calls = ask(client, agent, "hello", tool_choice="required", temperature=1, seed=5)
    assert reason == "tool_calls" and calls
    reason, ((name, arguments),) = ask(client, agent, question, tool_choice=named)
    assert (reason, name) == ("tool_calls", "set_timer") and isinstance(json.loads(arguments)["minutes"], int)


def test_a_schema_that_cannot_be_honoured_is_refused_only_where_it_must_be(client, agent):
    function = {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
    }
    loose, strict = ([{"type": "function", "function": {**function, "strict": strict}}] for strict in (False, True))
    assert ask(client, agent, "hello", tools=loose)[0] == "stop"
    with pytest.raises(openai.BadRequestError, match=r"tools cannot be honoured.*uniqueItems"):
        ask(client, agent, "hello", tools=strict)


@pytest.mark.parametrize("service", ["quire.gpu_worker", "quire.detokenizer", "quire.scheduler"])
def test_streams_of_calls_survive_a_kill(server, client, agent, service):
    """Each call comes whole and once, though a process is gone while most of them are being written."""
    (victim,) = [each for each in server.children() if service in each.cmdline()]
    questions = [f"what is the weather in {city}?" for city in CITIES] * 4
    alone = [ask(client, agent, question, tool_choice="required", seed=3, temperature=1) for question in questions]

    def stream(question):
        calls, reason = [], None
        body = {"messages": [{"role": "user", "content": question}], "tools": agent.TOOLS, "tool_choice": "required"}
        for chunk in client.chat.completions.create(model="quire-demo", **body, seed=3, temperature=1, stream=True):
            reason = chunk.choices[0].finish_reason or reason
            for piece in chunk.choices[0].delta.tool_calls or ():
                if piece.id:
                    calls.append((piece.function.name, ""))
                    if not shot:
                        shot.append(os.kill(victim.pid, signal.SIGKILL))
                calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + (piece.function.arguments or ""))
        return reason, calls

    shot = []
    with ThreadPoolExecutor(len(questions)) as pool:
        assert list(pool.map(stream, questions)) == alone
    assert shot
