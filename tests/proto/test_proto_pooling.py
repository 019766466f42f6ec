"""PoolingParams: what each field takes, and what is said of what it does not take."""

import itertools

import msgspec
import pytest

from quire.proto.codec import encode
from quire.proto.params import ParamError
from quire.proto.pooling import POOLINGS, TASKS, PoolingParams

BIG = 2**31 - 1
EMBEDS = {"embed": True, "token_embed": True, "classify": False, "score": False, "token_classify": False}
PER_TOKEN = {"embed": False, "token_embed": True, "classify": False, "score": False, "token_classify": True}


def refusal(**fields):
    with pytest.raises(ParamError) as caught:
        PoolingParams(**fields)
    return caught.value


def test_everything_is_the_model_s_own_by_default():
    params = PoolingParams()
    assert {getattr(params, name) for name in params.__struct_fields__} == {None}


@pytest.mark.parametrize(
    "fields",
    [
        *({"task": task} for task in TASKS), *({"pooling": pooling} for pooling in POOLINGS),
        {"dimensions": 1}, {"dimensions": BIG}, {"task": "embed", "dimensions": 4},
        {"task": "token_embed", "dimensions": 4}, {"normalize": False}, {"task": "embed", "normalize": True},
        {"use_activation": True}, {"task": "classify", "use_activation": False},
        {"task": "score", "use_activation": True}, {"task": "token_classify", "use_activation": True},
        {"truncate_prompt_tokens": 1}, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": BIG},
        {"skip_reading_prefix_cache": True}, {"skip_reading_prefix_cache": False},
    ],
)  # fmt: skip
def test_what_is_taken_survives_the_wire(fields):
    params = PoolingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields
    assert msgspec.msgpack.decode(encode(params), type=PoolingParams) == params


@pytest.mark.parametrize("task", TASKS)
def test_a_task_makes_embeddings_or_not_and_rows_for_tokens_or_not(task):
    params = PoolingParams(task=task)
    assert (params.embeds, params.per_token) == (EMBEDS[task], PER_TOKEN[task])


@pytest.mark.parametrize(("task", "pooling"), itertools.product(TASKS, POOLINGS))
def test_each_token_by_itself_goes_with_the_tasks_of_tokens_alone(task, pooling):
    if PER_TOKEN[task] == (pooling == "ALL"):
        assert PoolingParams(task=task, pooling=pooling).pooling == pooling
    else:
        remedy = "task 'token_embed' or 'token_classify'" if pooling == "ALL" else "pooling 'ALL'"
        error = refusal(task=task, pooling=pooling)
        said = f"pooling {pooling!r} does not go with task {task!r}; use {remedy}."
        assert (error.param, str(error)) == ("pooling", said)


@pytest.mark.parametrize("task", [task for task in TASKS if not EMBEDS[task]])
@pytest.mark.parametrize(("name", "value"), [("dimensions", 4), ("normalize", True), ("normalize", False)])
def test_what_is_an_embedding_s_is_refused_for_classifiers(task, name, value):
    error = refusal(task=task, **{name: value})
    said = f"{name} means nothing for task {task!r}; leave it out (it is embed's)."
    assert (error.param, str(error)) == (name, said)


@pytest.mark.parametrize("task", [task for task in TASKS if EMBEDS[task]])
@pytest.mark.parametrize("value", [True, False])
def test_what_is_a_classifier_s_is_refused_for_embeddings(task, value):
    error = refusal(task=task, use_activation=value)
    said = f"use_activation means nothing for task {task!r}; leave it out (it is classify's)."
    assert (error.param, str(error)) == ("use_activation", said)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("task", "rank", f"task must be one of {list(TASKS)}, got 'rank'."),
        ("task", 1, f"task must be one of {list(TASKS)}, got 1."),
        ("pooling", "cls", f"pooling must be one of {list(POOLINGS)}, got 'cls'."),
        ("dimensions", 0, "dimensions must be at least 1, got 0."),
        ("dimensions", 2**31, "dimensions must be at most 2147483647, got 2147483648."),
        ("dimensions", 1.0, "dimensions must be an integer, got 1.0."),
        ("dimensions", True, "dimensions must be an integer, got True."),
        ("normalize", 1, "normalize must be true or false, got 1."),
        ("use_activation", "x", "use_activation must be true or false, got 'x'."),
        ("skip_reading_prefix_cache", 0, "skip_reading_prefix_cache must be true or false, got 0."),
        ("truncate_prompt_tokens", 0,
         "truncate_prompt_tokens must be at least 1, got 0 (-1 keeps what the model can hold)."),
        ("truncate_prompt_tokens", -2,
         "truncate_prompt_tokens must be at least 1, got -2 (-1 keeps what the model can hold)."),
        ("truncate_prompt_tokens", -1.0, "truncate_prompt_tokens must be an integer, got -1.0."),
        ("truncate_prompt_tokens", 2**31, "truncate_prompt_tokens must be at most 2147483647, got 2147483648."),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_value_and_the_limit(name, value, said):
    error = refusal(**{name: value})
    assert (error.param, str(error)) == (name, said)


def test_checked_on_the_wire_too():
    with pytest.raises(msgspec.ValidationError, match="dimensions must be at least 1"):
        msgspec.msgpack.decode(encode({"dimensions": 0}), type=PoolingParams)
