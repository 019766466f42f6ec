"""What LLM's pooling methods take, refuse and return, and how scores come of what is pooled; no process is started."""

from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest

from quire import LLM
from quire.client.offline.checks import Limits
from quire.client.offline.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.client.offline.pooling import PoolingMethods, from_task
from quire.client.offline.scoring import Pairs, cosine
from quire.client.results import Pooled
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.checkpoint.pooler_config import PoolerConfig
from quire.proto.pooling import PoolingParams

EMBED = PoolerConfig("TinyModel", "embed", "CLS", True, True, "softmax", 4)
CLASSES = PoolerConfig("TinyForSequenceClassification", "classify", "CLS", True, True, "softmax", 4, ("a", "b", "c"))
CROSS = PoolerConfig("TinyForSequenceClassification", "classify", "CLS", True, True, "sigmoid", 4, ("x",))


class Pooler(PoolingMethods):
    """LLM without its processes: a text's vector is of its length, a pair's score the ratio of two lengths."""

    def __init__(self, pooler, has_tokenizer=True):
        config = ModelConfig(path="", hf={}, max_model_len=32, vocab_size=100)
        self.jobs, self.taken = [], 0
        limits = Limits(config, 20, [], has_tokenizer)
        supervisor = SimpleNamespace(args=SimpleNamespace(chat_template=None))
        self._running = SimpleNamespace(
            pooler=pooler, limits=limits, pool=self._run, adapters=None, supervisor=supervisor
        )

    def _take_numbers(self, count):
        self.taken += count
        return self.taken - count

    def _run(self, jobs, progress):
        self.jobs += jobs
        return [self._one(job) for job in jobs]

    def _one(self, job):
        given, task = job.given, job.params.task
        ids = given.ids or [len(given.text or "")]
        data = [float(ids[0]), 1.0, 2.0, 0.0]
        if task == "score" and given.messages is None:
            data = [len(given.text) / len(given.pair)]
        elif task == "classify":
            data = [0.25, 0.5, 0.25]
        return PoolingRequestOutput(job.request_id, PoolingOutput(numpy.array(data, numpy.float32)), ids, 1)


def run(pooler, method, *args, **kwargs):
    made = Pooler(pooler)
    return getattr(made, method)(*args, use_tqdm=False, **kwargs), made.jobs


# ---------------------------------------------------------------- outputs


def test_embed():
    outputs, jobs = run(EMBED, "embed", ["ab", {"prompt_token_ids": [7, 8]}, "c"])
    assert all(type(output) is EmbeddingRequestOutput for output in outputs)
    assert [output.outputs.embedding for output in outputs] == [[2, 1, 2, 0], [7, 1, 2, 0], [1, 1, 2, 0]]
    assert type(outputs[0].outputs.embedding) is list and outputs[0].outputs.hidden_size == 4
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    assert [output.prompt_token_ids for output in outputs] == [[2], [7, 8], [1]]
    assert all(output.finished and output.num_cached_tokens == 1 for output in outputs)
    assert repr(outputs[0]) == (
        "EmbeddingRequestOutput(request_id='0', outputs=EmbeddingOutput(hidden_size=4), prompt_token_ids=[2], "
        "num_cached_tokens=1, finished=True)"
    )
    assert {job.params.task for job in jobs} == {"embed"}


def test_what_vllm_now_calls_the_activation_of_an_embedding_is_its_length():
    bare = PoolingParams(use_activation=False)
    for method, task in (("embed", None), ("encode", None), ("encode", "token_embed"), ("score", None)):
        texts = ["ab"] * (2 if method == "score" else 1)
        _, jobs = run(EMBED, method, *texts, pooling_params=bare, **({"pooling_task": task} if task else {}))
        assert jobs[0].params == PoolingParams(task=task or "embed", normalize=False)
    assert bare == PoolingParams(use_activation=False)


def test_scores_of_late_interaction_ask_for_every_tokens_embedding():
    outputs, jobs = run(replace(EMBED, late_interaction=True), "score", "ab", ["a", "b"])
    assert len(outputs) == 2 and [job.params.task for job in jobs] == ["token_embed"] * 3


def test_texts_without_special_tokens():
    for pooler, method in ((EMBED, "encode"), (EMBED, "embed"), (CLASSES, "classify")):
        for special in (True, False):
            _, jobs = run(pooler, method, ["ab"], tokenization_kwargs={"add_special_tokens": special})
            assert [job.given.special for job in jobs] == [special]


def test_what_was_pooled_can_be_compared():
    one, same = (PoolingOutput(numpy.array([1.0, 2.0], numpy.float32)) for _ in range(2))
    assert one == same and one != PoolingOutput(same.data[:1]) and one != PoolingOutput(same.data + 1) and one != "x"
    assert PoolingRequestOutput("0", one, [1]) == PoolingRequestOutput("0", same, [1])


def test_encode_by_task():
    outputs, _ = run(EMBED, "encode", "ab")
    assert type(outputs[0]) is PoolingRequestOutput and outputs[0].outputs.data.tolist() == [2, 1, 2, 0]
    assert outputs[0].outputs.embedding == [2, 1, 2, 0]
    for pooler, task, expected in (
        (EMBED, None, "embed"), (EMBED, "encode", "embed"), (EMBED, "token_embed", "token_embed"),
        (CLASSES, None, "classify"), (CLASSES, "reward", "token_classify"), (CROSS, "encode", "classify"),
    ):  # fmt: skip
        assert run(pooler, "encode", "ab", pooling_task=task)[1][0].params.task == expected
    rewards, jobs = run(CLASSES, "reward", "ab", truncate_prompt_tokens=1)
    assert jobs[0].params == PoolingParams(task="token_classify", truncate_prompt_tokens=1)
    assert type(rewards[0]) is PoolingRequestOutput
    assert run(EMBED, "encode", None, None, [[3], [4]])[0][1].prompt_token_ids == [4]
    assert run(EMBED, "encode", prompt_token_ids=[3, 4])[0][0].prompt_token_ids == [3, 4]
    assert run(EMBED, "encode", inputs=["a"])[0][0].prompt_token_ids == [1]


def test_classify():
    (output,), jobs = run(CLASSES, "classify", "ab", pooling_params=PoolingParams(use_activation=False))
    assert type(output) is ClassificationRequestOutput
    assert output.outputs.probs == [0.25, 0.5, 0.25] and output.outputs.num_classes == 3
    assert "ClassificationOutput(num_classes=3)" in repr(output)
    assert jobs[0].params == PoolingParams(task="classify", use_activation=False)


def test_a_template_puts_the_texts_of_a_score_together():
    made = Pooler(CROSS)
    made._one = lambda job: PoolingRequestOutput(job.request_id, PoolingOutput(numpy.ones(1, numpy.float32)), [1], 0)
    made.score("q", ["a", "b"], use_tqdm=False, chat_template="T")
    pairs = [[{"role": "query", "content": "q"}, {"role": "document", "content": text}] for text in ("a", "b")]
    options = {"add_generation_prompt": False, "continue_final_message": False}
    assert [job.given.messages for job in made.jobs] == pairs and made.jobs[0].given.pair is None
    assert made.jobs[0].given.template == {**options, "chat_template": "T"}
    made._running.supervisor.args.chat_template = "usual"
    made.score("q", "a", use_tqdm=False)
    assert made.jobs[2].given.messages == pairs[0] and made.jobs[2].given.template == options


def test_score_with_a_cross_encoder():
    outputs, jobs = run(CROSS, "score", "ab", ["a", "abcd"])
    assert [type(output) for output in outputs] == [ScoringRequestOutput] * 2
    assert [output.outputs.score for output in outputs] == [2.0, 0.5]
    assert [(job.given.text, job.given.pair) for job in jobs] == [("ab", "a"), ("ab", "abcd")]
    assert [output.request_id for output in outputs] == ["0", "1"]
    assert "ScoringOutput(score=2.0)" in repr(outputs[0])
    outputs, jobs = run(CROSS, "score", ["a", "b"], ["c", "de"])
    assert [(job.given.text, job.given.pair) for job in jobs] == [("a", "c"), ("b", "de")]


def test_score_with_embeddings():
    outputs, jobs = run(EMBED, "score", "ab", ["ab", "abcdef"], truncate_prompt_tokens=5)
    a, b = numpy.array([2, 1, 2, 0.0]), numpy.array([6, 1, 2, 0.0])
    assert outputs[0].outputs.score == pytest.approx(1, abs=1e-12)
    assert outputs[1].outputs.score == pytest.approx(a @ b / numpy.sqrt((a @ a) * (b @ b)), abs=1e-12)
    assert [output.prompt_token_ids for output in outputs] == [[2, 2], [2, 6]]
    assert outputs[1].num_cached_tokens == 2
    assert [job.given.text for job in jobs] == ["ab", "ab", "abcdef"]  # the first is run once
    assert {job.params.truncate_prompt_tokens for job in jobs} == {5}


def test_the_cosine_with_nothing_is_nothing():
    zero, one = numpy.zeros(3, numpy.float32), numpy.ones(3, numpy.float32)
    assert cosine(zero, one) == cosine(zero, zero) == 0
    assert cosine(one * 1e-30, one) == pytest.approx(0, abs=1e-6)
    assert cosine(one, -one * 1e18) == pytest.approx(-1)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([], ["a"], "At least one text element must be given"),
        ("a", [], "At least one text_pair element must be given"),
        (["a", "b"], ["c"], "Input lengths must be either 1:1, 1:N or N:N"),
        (["a", "b"], ["c", "d", "e"], "Input lengths must be either 1:1, 1:N or N:N"),
        (["a", "b"], [], "Input lengths must be either 1:1, 1:N or N:N"),
    ],
)
@pytest.mark.parametrize("pooler", [EMBED, CROSS])
def test_sides_that_do_not_match(pooler, first, second, message):
    with pytest.raises(ValueError, match=message):
        run(pooler, "score", first, second)


def test_a_score_is_one_number():
    with pytest.raises(ValueError, match="Scoring API is only enabled for num_labels == 1"):
        run(CLASSES, "score", "a", "b")
    with pytest.raises(ValueError, match="Scoring API is only enabled for num_labels == 1"):
        Pairs(["a"], ["b"], cross=True).scores([Pooled([1], numpy.ones(2, numpy.float32))])


@pytest.mark.parametrize(
    ("pooler", "method", "args", "kwargs", "kind", "message"),
    [
        (EMBED, "embed", [None], {}, ValueError, "Either prompts or prompt_token_ids must be provided"),
        (EMBED, "encode", [], {}, ValueError, "Either prompts or prompt_token_ids must be provided"),
        (EMBED, "encode", ["a"], {"inputs": "b"}, TypeError, "inputs is another name of prompts"),
        (EMBED, "embed", [5], {}, TypeError, "prompts must be a prompt or a list of prompts, got int"),
        (EMBED, "embed", [[[]]], {}, ValueError, "prompt must not be empty"),
        (EMBED, "embed", [[100]], {}, ValueError, "Token id 100 is out of vocabulary"),
        (EMBED, "embed", [[-1]], {}, ValueError, "Token id -1 is out of vocabulary"),
        (EMBED, "encode", ["a", 5], {}, TypeError, "pooling_params must be PoolingParams or a list of them, got int"),
        (EMBED, "encode", ["a", ["x"]], {}, TypeError, "pooling_params must be PoolingParams .* got one str"),
        (EMBED, "encode", [["a", "b"], [PoolingParams()]], {}, ValueError, "lengths of prompts and params must be"),
        (EMBED, "encode", ["a"], {"pooling_task": "think"}, ValueError, "task must be one of"),
        (EMBED, "encode", ["a"], {"pooling_task": "classify"}, ValueError, "task 'classify' is not what TinyModel"),
        (EMBED, "embed", ["a"], {"truncate_prompt_tokens": 0}, ValueError, "truncate_prompt_tokens must be at least 1"),
        (EMBED, "embed", ["a"], {"truncate_prompt_tokens": 1.5}, ValueError, "truncate_prompt_tokens must be an integ"),
        (EMBED, "embed", ["a"], {"pooling_params": PoolingParams(dimensions=5)}, ValueError, "dimensions must be at m"),
        (EMBED, "embed", ["a"], {"pooling_params": PoolingParams(normalize=True, use_activation=True)}, ValueError,
         "use_activation means nothing"),
        (CLASSES, "classify", ["a"], {"pooling_params": PoolingParams(normalize=True)}, ValueError, "means nothing"),
        (EMBED, "embed", ["a"], {"lora_request": object()}, ValueError, "but LoRA is not enabled"),
        (EMBED, "embed", ["\ud800"], {}, ValueError, "lone surrogate"),
        (EMBED, "score", [[[5]], "a"], {}, TypeError, "texts to be scored must be strings"),
        (CROSS, "embed", ["a"], {}, ValueError, "Embedding API is not supported by this model. .* `--convert embed`"),
        (EMBED, "classify", ["a"], {}, ValueError, "Classification API is not supported by this model. .*`--convert"),
    ],
)  # fmt: skip
def test_what_is_refused_and_nothing_runs(pooler, method, args, kwargs, kind, message):
    made = Pooler(pooler)
    with pytest.raises(kind, match=message):
        getattr(made, method)(*args, use_tqdm=False, **kwargs)
    assert not made.jobs


@pytest.mark.parametrize("method", ["encode", "embed", "classify", "score"])
def test_a_model_that_generates(method):
    with pytest.raises(
        ValueError, match=rf"^LLM\.{method}\(\) is only supported for pooling models\. Try passing `--r"
    ):
        run(None, method, "a", *(["b"] if method == "score" else []))


def test_a_model_that_pools_does_not_generate():
    llm = LLM.__new__(LLM)
    for pooler, remedy in ((EMBED, " Try passing `--runner generate`"), (replace(EMBED, whole=True), "$")):
        llm._running = SimpleNamespace(pooler=pooler)
        for method, args in (("generate", ["a"]), ("chat", [[]]), ("beam_search", ["a", None])):
            with pytest.raises(
                ValueError, match=rf"^LLM\.{method}\(\) is only supported for generative models\.{remedy}"
            ):
                getattr(llm, method)(*args)


def test_without_a_tokenizer_prompts_are_ids():
    made = Pooler(EMBED, has_tokenizer=False)
    assert made.embed([5, 6], use_tqdm=False)[0].prompt_token_ids == [5, 6]
    with pytest.raises(ValueError, match="cannot pass text prompts"):
        made.embed("a", use_tqdm=False)


def test_the_older_keyword_task():
    assert from_task("embed") == {"runner": "pooling", "convert": "embed"} == from_task("embedding")
    assert from_task("generate") == {"runner": "generate"} and from_task("auto") == {}
    assert from_task("classify") == {"runner": "pooling", "convert": "classify"}
    with pytest.raises(ValueError, match=r"task must be one of .*, got 'dance'; newer names are runner and convert"):
        LLM("nowhere", task="dance")
    with pytest.raises(TypeError, match="override_pooler_config is another name of pooler_config"):
        LLM("nowhere", pooler_config={"normalize": False}, override_pooler_config={"normalize": True})
