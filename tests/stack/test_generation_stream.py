"""What is streamed is what is not: over 500 random requests, three kinds of tokenizer, with stop strings.

The model is random and the temperature high, so tokens cut characters, words and stop strings in every way.
"""

import asyncio
import json
import random

import aiohttp
import pytest
import stack
import text_tokenizers
import tiny_models
from transformers import AutoTokenizer

REQUESTS = 170  # for each kind


def bodies(tokenizer, seed):
    """Random requests, with no stop strings yet."""
    rng = random.Random(seed)
    size = len(tokenizer)
    return [
        {
            "prompt": [rng.randrange(4, size) for _ in range(rng.randrange(1, 12))], "seed": number, "temperature": 2.0,
            "max_tokens": rng.randrange(1, 48), "ignore_eos": rng.random() < 0.7,
            "skip_special_tokens": rng.random() < 0.7,
        }
        for number in range(REQUESTS)
    ]  # fmt: skip


def with_stops(body, text, rng):
    """The request with stop strings cut from what it gives without: most are met, wherever tokens cut them."""
    starts = [rng.randrange(len(text)) for _ in range(rng.randrange(1, 4))] if text and rng.random() < 0.7 else []
    stops = [text[start : start + rng.randrange(1, 5)] for start in starts]
    few = rng.choice([0, 0, 1, min(5, body["max_tokens"])])
    return {
        **body, "stop": [stop for stop in stops if "\ufffd" not in stop], "min_tokens": few,
        "include_stop_str_in_output": rng.random() < 0.3,
    }  # fmt: skip


async def whole_texts(url, requests):
    """The text of each request."""

    async def one(session, body):
        async with session.post(url, json=body) as answer:
            return (await answer.json())["choices"][0]["text"]

    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(one(session, body) for body in requests))


async def both(url, requests):
    """(text streamed, its pieces, finish, stop) and (text at once, finish, stop) of each request."""
    gate = asyncio.Semaphore(24)

    async def one(session, body):
        async with gate:
            async with session.post(url, json=body) as answer:
                assert answer.status == 200, await answer.text()
                whole = (await answer.json())["choices"][0]
            pieces, finish, stop = [], None, None
            async with session.post(url, json={**body, "stream": True}) as answer:
                assert answer.status == 200
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        pieces.append(choice["text"])
                        finish, stop = choice["finish_reason"] or finish, choice["stop_reason"] or stop
            return (pieces, finish, stop), (whole["text"], whole["finish_reason"], whole["stop_reason"])

    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(one(session, body) for body in requests))


@pytest.mark.parametrize("kind", text_tokenizers.KINDS)
def test_streamed_text_is_the_whole_text(kind, tmp_path):
    tokenizer = text_tokenizers.KINDS[kind]()
    size = tokenizer.get_vocab_size()
    folder = tiny_models.make(
        "llama", tmp_path / "model", seed=2, vocab_size=size, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    text_tokenizers.save(tokenizer, folder)
    requests = bodies(AutoTokenizer.from_pretrained(folder), seed=len(kind))
    server = stack.Server(str(folder), "--max-model-len=128", "--dtype=float32")
    try:
        url, rng = server.url + "/v1/completions", random.Random(len(kind))
        texts = asyncio.run(whole_texts(url, requests))
        requests = [with_stops(body, text, rng) for body, text in zip(requests, texts, strict=True)]
        answers = asyncio.run(both(url, requests))
    finally:
        server.close()
    for body, ((pieces, finish, stop), (whole, *ending)) in zip(requests, answers, strict=True):
        assert "".join(pieces) == whole, body
        assert [finish, stop] == ending
        if "\ufffd" not in whole:
            assert not any("\ufffd" in piece for piece in pieces)
        if stop and not body["include_stop_str_in_output"]:
            assert not any(s in whole for s in body["stop"]) or body["min_tokens"]
    assert sum(stop is not None for (_, _, stop), _ in answers) > REQUESTS // 4
    assert len({whole for _, (whole, *_) in answers}) > REQUESTS // 2
