"""Embeddings, scores and ranks over the real stack, by LLM and over HTTP, with tiny models, against transformers."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy
import openai
import pytest
from pooling_models import Reference
from stack import wait_until

from quire import LLM, PoolingParams

TEXTS = ["hello", "the quick brown fox", "a", "so it goes, and goes", "what is 2+2?", "x" * 40, ""]
QUERY = "what is a fox?"
LONG = "x " * 200
CLOSE = {"abs": 1e-5, "rel": 1e-4}


class Running:
    """An LLM, and a frontend that serves the same processes over HTTP."""

    def __init__(self, reference, **flags):
        self.reference = reference
        self.llm = LLM(reference.folder, dtype="float32", max_num_seqs=8, **flags)
        command = [
            sys.executable, "-P", "-m", "quire.frontend", "--host=127.0.0.1", "--port=0", f"--model={reference.folder}",
            f"--scheduler={self.llm._running.supervisor.address}", "--served-model-name=tiny",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.url = self.process.stdout.readline().split()[-1]

    def post(self, path, body):
        """Status and decoded body."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def idle(self):
        """Nothing is left in the scheduler."""
        stats = self.llm.stats()
        return not (stats.running or stats.waiting or stats.blocks_used)

    def close(self):
        self.process.kill()
        self.process.communicate()
        self.llm.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """An embedding model and a cross-encoder, started side by side."""
    made = [
        (Reference(tmp_path_factory.mktemp("embed")), {"task": "embed"}),
        (Reference(tmp_path_factory.mktemp("cross"), labels=1), {"runner": "pooling"}),
    ]
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(Running, reference, **flags) for reference, flags in made]
    try:
        yield [start.result() for start in starts]
    finally:
        for start in starts:
            if not start.exception():
                start.result().close()


@pytest.fixture
def embed(running):
    return running[0]


@pytest.fixture
def cross(running):
    return running[1]


def test_embeddings_by_llm_and_by_the_openai_client(embed):
    expected = [embed.reference.embedding(text) for text in TEXTS]
    outputs = embed.llm.embed(TEXTS, use_tqdm=False)
    for output, vector in zip(outputs, expected, strict=True):
        assert output.outputs.embedding == pytest.approx(vector, **CLOSE)
    assert outputs[0].prompt_token_ids == embed.reference.tokenizer(TEXTS[0])["input_ids"]
    client = openai.OpenAI(api_key="EMPTY", base_url=embed.url + "/v1", max_retries=0)
    plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    packed = client.embeddings.create(model="tiny", input=TEXTS)  # in base64
    assert [each.embedding for each in plain.data] == [each.embedding for each in packed.data]
    for each, vector in zip(plain.data, expected, strict=True):
        assert each.embedding == pytest.approx(vector, **CLOSE)
    ids = [output.prompt_token_ids for output in outputs]
    assert plain.usage.prompt_tokens == sum(map(len, ids))
    by_ids = client.embeddings.create(model="tiny", input=ids, encoding_format="float")
    assert [each.embedding for each in by_ids.data] == [each.embedding for each in plain.data]


def test_embeddings_in_other_forms(embed):
    (full,) = embed.llm.embed("the quick brown fox", use_tqdm=False)
    (short,) = embed.llm.embed("the quick brown fox", pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
    cut = numpy.array(full.outputs.embedding[:8])
    assert short.outputs.embedding == pytest.approx((cut / numpy.linalg.norm(cut)).tolist(), **CLOSE)
    (rows,) = embed.llm.encode("the fox", pooling_task="token_embed", use_tqdm=False)
    assert rows.outputs.data.shape == (len(rows.prompt_token_ids), 32)
    (kept,) = embed.llm.embed("the quick", truncate_prompt_tokens=4, use_tqdm=False)
    assert len(kept.prompt_token_ids) == 4 and kept.prompt_token_ids[0] == 2 and kept.prompt_token_ids[-1] == 3
    for output, text in zip(embed.llm.score(QUERY, TEXTS[:3], use_tqdm=False), TEXTS[:3], strict=True):
        a, b = (numpy.array(embed.reference.embedding(each)) for each in (QUERY, text))
        assert output.outputs.score == pytest.approx(float(a @ b), **CLOSE)


def test_scores_and_ranks_of_a_cross_encoder(cross):
    expected = [cross.reference.score(QUERY, text) for text in TEXTS]
    assert len({round(score, 4) for score in expected}) == len(TEXTS)
    outputs = cross.llm.score(QUERY, TEXTS, use_tqdm=False)
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, **CLOSE)
    status, body = cross.post("/score", {"model": "tiny", "text_1": QUERY, "text_2": TEXTS})
    assert status == 200 and [each["score"] for each in body["data"]] == pytest.approx(expected, **CLOSE)
    status, body = cross.post("/v1/rerank", {"model": "tiny", "query": QUERY, "documents": TEXTS, "top_n": 4})
    order = sorted(range(len(TEXTS)), key=lambda place: -expected[place])[:4]
    assert status == 200 and [each["index"] for each in body["results"]] == order
    assert [each["document"]["text"] for each in body["results"]] == [TEXTS[place] for place in order]
    assert [each["relevance_score"] for each in body["results"]] == pytest.approx(
        [expected[place] for place in order], **CLOSE
    )
    single = cross.reference.score("hello")
    (output,) = cross.llm.classify("hello", use_tqdm=False)
    assert output.outputs.probs == pytest.approx([single], **CLOSE)
    (each,) = cross.post("/classify", {"input": "hello"})[1]["data"]
    assert each == {"index": 0, "label": "LABEL_0", "probs": output.outputs.probs, "num_classes": 1}


def test_one_input_that_is_too_long_fails_alone_with_its_request(embed, cross):
    status, body = embed.post("/v1/embeddings", {"input": ["a", "b", LONG, "c"]})
    assert status == 400 and body["error"]["param"] == "input" and body["error"]["message"].startswith("input[2]")
    status, body = cross.post("/rerank", {"query": "a", "documents": ["b", LONG]})
    assert status == 400 and body["error"]["message"].startswith("documents[1]")
    with pytest.raises(ValueError, match="maximum context length is 64 tokens"):
        embed.llm.embed(["a", LONG], use_tqdm=False)
    assert embed.post("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": -1})[0] == 200
    wait_until(lambda: embed.idle() and cross.idle(), "nothing left")


def test_many_at_once_are_not_mixed_up(embed, cross):
    texts = [f"{word} {number}" for number in range(4) for word in ("so", "it", "goes and goes")]
    vectors = {text: embed.reference.embedding(text) for text in texts}
    scores = {text: cross.reference.score(QUERY, text) for text in texts}

    def ask(number):
        some = texts[number % 5 :: 1 + number % 3]
        if number % 2:
            _, body = cross.post("/score", {"text_1": QUERY, "text_2": some})
            assert [each["score"] for each in body["data"]] == pytest.approx([scores[t] for t in some], **CLOSE)
        else:
            _, body = embed.post("/v1/embeddings", {"input": some})
            for each, text in zip(body["data"], some, strict=True):
                assert each["embedding"] == pytest.approx(vectors[text], **CLOSE)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(24)))
    wait_until(lambda: embed.idle() and cross.idle(), "nothing left")
    assert embed.llm.get_metrics()


def test_what_a_pooling_model_does_not_do(embed, cross):
    with pytest.raises(ValueError, match=r"LLM\.generate\(\) is only supported for generative models"):
        embed.llm.generate("a")
    status, body = embed.post("/v1/completions", {"prompt": "a"})
    assert status == 400 and "does not support Completions API" in body["error"]["message"]
    status, body = cross.post("/v1/embeddings", {"input": "a"})
    assert status == 400 and "does not support Embeddings API" in body["error"]["message"]
    with urllib.request.urlopen(embed.url + "/health/generate", timeout=60) as answer:
        assert answer.status == 200
