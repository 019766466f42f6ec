"""Structured output through the real stack: 200 JSON schemas with the demo model at temperature 1.

Every output that ends by itself parses and validates, streamed or not; requests without a form, run in the same
batches, keep their tokens.
"""

import asyncio
import json

import aiohttp
import json_schemas
import jsonschema
import pytest
import stack

FREE = [{"prompt": f"Number {i} is", "seed": i, "max_tokens": 60, "temperature": 1.0} for i in range(17)]
BAD = [
    {"json": {"type": "nonsense"}}, {"json": '{"type": '}, {"regex": "(a"}, {"grammar": "start: undefined_rule"},
    {"json": {"$ref": "#/$defs/missing"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    made = stack.Server()
    yield made
    made.close()


async def ask(session, gate, url, body):
    """(text, finish reason). Where a grammar's check takes long, 429 says to come back: a machine that others use."""
    async with gate:
        while True:
            async with session.post(url, json=body) as answer:
                if answer.status != 429:
                    return await read(answer, body)
            await asyncio.sleep(0.5)


async def read(answer, body):
    assert answer.status == 200, (body, await answer.text())
    if not body.get("stream"):
        choice = (await answer.json())["choices"][0]
        return choice["text"], choice["finish_reason"]
    text, finish = "", None
    async for line in answer.content:
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            text, finish = text + choice["text"], choice["finish_reason"] or finish
    return text, finish


async def ask_all(url, requests, at_once=48):
    gate = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(240)) as session:
        return await asyncio.gather(*(ask(session, gate, url, body) for body in requests))


def test_200_schemas_beside_free_requests(server):
    url = server.url + "/v1/completions"
    schemas = json_schemas.schemas()
    assert len(schemas) >= 200
    alone = asyncio.run(ask_all(url, FREE, at_once=1))
    requests = [
        {"prompt": "JSON: ", "seed": i, "temperature": 1.0, "max_tokens": 160, "stream": bool(i % 2),
         "structured_outputs": {"json": schema}}
        for i, schema in enumerate(schemas)
    ]  # fmt: skip
    every = len(requests) // len(FREE)
    mixed = [each for i, body in enumerate(FREE) for each in (body, *requests[i * every : (i + 1) * every])]
    mixed += requests[len(FREE) * every :]
    answers = dict(zip(map(id, mixed), asyncio.run(ask_all(url, mixed)), strict=True))
    finished = 0
    for schema, body in zip(schemas, requests, strict=True):
        text, finish = answers[id(body)]
        if finish == "stop":
            jsonschema.validate(json.loads(text), schema)
            finished += 1
    assert finished >= len(schemas) // 2, f"only {finished} of {len(schemas)} ended by themselves"
    for body, expected in zip(FREE, alone, strict=True):
        assert answers[id(body)] == expected


@pytest.mark.parametrize("form", BAD)
def test_what_cannot_be_is_a_400_and_harms_nobody(server, form):
    body = {"prompt": "x", "max_tokens": 8, "structured_outputs": form}
    status, answer, _ = server.post("/v1/completions", body)
    assert status == 400, answer
    assert answer["error"]["message"] and "\n" not in answer["error"]["message"]
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_every_form_over_chat(server, stream):
    chat = {"messages": [{"role": "user", "content": "Say it"}], "max_tokens": 40, "temperature": 1.0, "seed": 3}
    forms = [
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_regex": "[a-c]{2,4}[0-9]"}, lambda text: text[:2].isalpha() and text[-1].isdigit()),
        ({"guided_grammar": 'start: "a" | "b" start'}, lambda text: text.strip("b") == "a"),
        ({"guided_json": {"enum": [1, 22, 333]}}, lambda text: json.loads(text) in (1, 22, 333)),
        ({"structured_outputs": {"choice": ["left", "right"]}}, lambda text: text in ("left", "right")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}},
         lambda text: json.loads(text) in (True, False)),
    ]  # fmt: skip
    for form, right in forms:
        text, finish = asyncio.run(chat_text(server.url + "/v1/chat/completions", {**chat, **form, "stream": stream}))
        assert finish == "length" or right(text), (form, text)


async def chat_text(url, body):
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        if not body["stream"]:
            choice = (await answer.json())["choices"][0]
            return choice["message"]["content"], choice["finish_reason"]
        text, finish = "", None
        async for line in answer.content:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text, finish = text + (choice["delta"].get("content") or ""), choice["finish_reason"] or finish
        return text, finish
