"""LLM around the processes: defaults, checks, processors by name, the shapes of beam search, metrics."""

import json
import logging
import sys
import threading

import pytest

from quire import BeamSearchParams, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
from quire.client.background import EngineThread
from quire.client.offline import llm
from quire.client.offline.batch import Offline
from quire.client.offline.beams import beam_output
from quire.client.offline.checks import Limits, check_input, check_params, formed, shortened
from quire.client.offline.defaults import default_sampling
from quire.client.offline.metrics import Counter, Gauge, Histogram, Recorder
from quire.client.offline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.client.offline.processors import processor_names
from quire.client.offline.prompts import Input, parse_priority, parse_prompts
from quire.client.supervisor.commands import import_path
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.config import ConfigError
from quire.proto.messages import Stats
from quire.proto.params import RequestOutputKind

# ---------------------------------------------------------------- flags


def test_forms_follow_the_rules_of_structured_output():
    own = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}))
    plain = SamplingParams(max_tokens=3)
    limits = Limits(
        ModelConfig("", {}, max_model_len=100, vocab_size=50), 5, [], True, rules={"disable_any_whitespace": True}
    )
    short, same = formed([own, plain], limits)
    assert short.structured_outputs.disable_any_whitespace and same is plain
    assert not own.structured_outputs.disable_any_whitespace  # the caller's is as it was
    limits.reasoning = "qwen3"
    (late,) = formed([own], limits)
    form = json.loads(late.structured_outputs.structural_tag)["format"]
    assert form["type"] == "after_thought" and form["thought"]["end"] == "</think>"
    assert late.structured_outputs.disable_any_whitespace


def test_the_flags_of_kernels_reach_the_workers(monkeypatch):
    started = []

    def start(args, own):
        started.append(args)
        raise InterruptedError  # that is all

    monkeypatch.setattr(llm, "Offline", start)
    flags = {"attention_backend": "triton", "batch_invariant": True, "disable_custom_all_reduce": True}
    with pytest.raises(InterruptedError):
        llm.LLM("m", max_seq_len_to_capture=64, **flags)
    assert {
        "--attention-backend=triton", "--batch-invariant", "--disable-custom-all-reduce", "--max-seq-len-to-capture=64",
    } <= set(started[0].argv_for("gpu_worker"))  # fmt: skip
    with pytest.raises(ConfigError, match="max_seq_len_to_capture must be at least 1, got 0"):
        llm.LLM("m", max_seq_len_to_capture=0)


# ---------------------------------------------------------------- defaults


def test_defaults_by_flag(tmp_path, caplog):
    model = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 99, "eos_token_id": 2, "min_p": None}
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_tokens": 99}
    assert default_sampling(model) == expected
    assert default_sampling({**model, "do_sample": False, "repetition_penalty": 1.1}) == {
        "max_tokens": 99, "repetition_penalty": 1.1,
    }  # fmt: skip
    assert default_sampling(model, "quire") == default_sampling(model, "vllm") == {} == default_sampling({})
    with caplog.at_level(logging.WARNING):
        assert default_sampling({"top_p": 7, "temperature": "hot", "top_k": 5}) == {"top_k": 5}
    assert "top_p=7" in caplog.text and "'hot'" in caplog.text
    (tmp_path / "generation_config.json").write_text('{"min_p": 0.1}')
    assert default_sampling(model, str(tmp_path)) == {"min_p": 0.1}
    override = json.dumps({"temperature": None, "max_new_tokens": 5, "repetition_penalty": 1.2})
    changed = {"top_k": 20, "top_p": 0.9, "max_tokens": 5, "repetition_penalty": 1.2}
    assert default_sampling(model, "auto", override) == changed
    assert default_sampling(model, "quire", '{"max_tokens": 4}') == {"max_tokens": 4}


@pytest.mark.parametrize(
    ("mode", "override", "message"),
    [
        ("nowhere", None, "generation_config='nowhere' must be auto, quire or a folder"),
        ("auto", "{", "override_generation_config must be a JSON object .* got '{'"),
        ("auto", "[1]", r"override_generation_config must be a JSON object .* got '\[1\]'"),
        ("auto", '{"eos_token_id": 1}', "override_generation_config has 'eos_token_id'; it may set temperature"),
        ("quire", '{"top_p": 2}', r"override_generation_config: top_p must be in \(0, 1\], got 2"),
        ("auto", '{"temperature": "x"}', "override_generation_config: temperature must be a number, got 'x'"),
    ],
)
def test_flags_that_cannot_work(mode, override, message):
    with pytest.raises(ConfigError, match=message):
        default_sampling({}, mode, override)


def test_a_folder_whose_file_is_no_object(tmp_path):
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        default_sampling({}, str(tmp_path))


# ---------------------------------------------------------------- checks


def limits(**changes):
    fields = {"max_logprobs": 20, "processors": ["a:f"], "has_tokenizer": True, **changes}
    return Limits(ModelConfig("", {}, max_model_len=100, vocab_size=50), **fields)


@pytest.mark.parametrize(
    ("params", "changes", "message"),
    [
        ({"max_tokens": 101}, {}, "max_tokens=101 cannot be greater than max_model_len=100"),
        ({"truncate_prompt_tokens": 101}, {}, "truncate_prompt_tokens=101 cannot be greater than max_model_len=100"),
        ({"stop_token_ids": [3, 50]}, {}, "stop_token_ids contains the token id 50, which is out of vocabulary"),
        ({"allowed_token_ids": [50]}, {}, "allowed_token_ids contains the token id 50"),
        ({"logit_bias": {50: 1}}, {}, "logit_bias contains the token id 50"),
        ({"logprobs": 21}, {}, "Requested sample logprobs of 21, which is greater than max allowed: 20"),
        ({"prompt_logprobs": -1}, {}, "Requested prompt logprobs of 50, which is greater than max allowed: 20"),
        ({"logits_processors": ["b:g"]}, {}, "names 'b:g', which is not registered .registered: a:f."),
        ({"logits_processors": ["b:g"]}, {"processors": []}, "registered: none"),
        ({"stop": "x"}, {"has_tokenizer": False}, "stop requires a tokenizer so it can't be used"),
        ({"bad_words": ["x"]}, {"has_tokenizer": False}, "bad_words requires a tokenizer so it can't be used"),
        ({"structured_outputs": "x"}, {"has_tokenizer": False}, "Structured outputs requires a tokenizer so it can't"),
        ({"structured_outputs": "x"}, {"no_structure": "another vocabulary"}, "another vocabulary"),
        ({"n": 1, "best_of": 2, "output_kind": RequestOutputKind.DELTA}, {}, "best_of must equal n to use output_kind"),
    ],
)
def test_params_that_could_not_be_run(params, changes, message):
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(regex="a")
    with pytest.raises(ValueError, match=message):
        check_params([SamplingParams(), SamplingParams(**params)], limits(**changes))


def test_params_at_the_limits():
    fine = SamplingParams(
        max_tokens=100, logprobs=20, prompt_logprobs=0, stop_token_ids=[49], logit_bias={0: 1}, stop="x",
        truncate_prompt_tokens=-1, logits_processors=["a:f"], structured_outputs=StructuredOutputsParams(regex="a"),
    )  # fmt: skip
    check_params([fine, SamplingParams(n=2, best_of=3)], limits())
    check_params([SamplingParams(logprobs=-1)], limits(max_logprobs=-1))


def test_prompts_at_the_limits():
    for ids, keep in [([1] * 99, None), ([1] * 500, 99), ([1] * 500, -1), ([99] * 400 + [1] * 3, 3)]:
        check_input(Input(ids=ids), SamplingParams(truncate_prompt_tokens=keep), limits())
    check_input(Input(text="x", ids=[1]), SamplingParams(), limits(has_tokenizer=False))
    for given, params, message in [
        (Input(ids=[1] * 100), {}, "leaves no room for"), (Input(ids=[1] * 101), {}, "even without any"),
        (Input(ids=[]), {}, "must not be empty"), (Input(ids=[1, 50]), {}, "Token id 50 is out of vocabulary"),
        (Input(ids=[1] * 200), {"truncate_prompt_tokens": 100}, "leaves no room for"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            check_input(given, SamplingParams(**params), limits())
    for given in (Input(text="x"), Input(messages=[{}])):
        with pytest.raises(ValueError, match="You cannot pass text prompts when `skip_tokenizer_init=True`"):
            check_input(given, SamplingParams(), limits(has_tokenizer=False))


# ---------------------------------------------------------------- logits processors


def test_a_fork_of_the_process_that_made_an_llm_is_told_so():
    thread = object.__new__(EngineThread)
    thread._thread = threading.Thread()  # as a fork leaves every thread: not running
    offline = object.__new__(Offline)
    offline._dead, offline._thread = None, thread
    for ask in (offline.stats, offline.metrics):
        with pytest.raises(RuntimeError, match="fork"):
            ask()


def test_texts_that_are_more_than_strings():
    class Text(str):
        """As numpy's and jinja's."""

    for prompts in (Text("aé"), [Text("aé")], {"prompt": Text("aé")}):
        (given,) = parse_prompts(prompts, None)
        assert (given.text, type(given.text)) == ("aé", str)


def test_prompts_by_vllms_names():
    (text,) = parse_prompts(TextPrompt(prompt="a"), None)
    (ids,) = parse_prompts([TokensPrompt(prompt_token_ids=[1, 2], prompt="b")], None)
    assert (text.text, text.ids, ids.text, ids.ids) == ("a", None, "b", [1, 2])
    (given,) = parse_prompts({"prompt": "a", "prompt_token_ids": None, "cache_salt": None}, None)
    assert given == text
    assert "cache_salt" not in given.asked()
    (salted,) = parse_prompts(TextPrompt(prompt="a", cache_salt="x"), None)
    assert salted.asked()["cache_salt"] == "x"
    for bad in ("", 5, ["x"]):
        with pytest.raises(ValueError, match="cache_salt must be a non-empty string"):
            parse_prompts({"prompt": "a", "cache_salt": bad}, None)
    with pytest.raises(ValueError, match=r"cache_salt '\\ud800' cannot be sent"):
        parse_prompts({"prompt": "a", "cache_salt": "\ud800"}, None)


def test_texts_without_special_tokens():
    for options, special in ((None, True), ({}, True), ({"add_special_tokens": True}, True)):
        assert parse_prompts("a", None, options)[0].special is special
    assert [each.special for each in parse_prompts(["a", [1]], None, {"add_special_tokens": False})] == [False] * 2
    for bad, kind, said in [
        ({"add_special_tokens": 0}, TypeError, "true or false, got 0"), ([5], TypeError, "must be a dict, got list"),
        ({"truncation": True}, ValueError, "has 'truncation'; it may have add_special_tokens"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=said):
            parse_prompts("a", None, bad)


def test_one_priority_for_all():
    assert parse_priority(3, 2) == [3, 3] and parse_priority(None, 2) == [0, 0] and parse_priority([1, 2], 2) == [1, 2]
    for bad, kind in ((True, TypeError), (1.5, TypeError), ("12", TypeError), ([], ValueError), (2**31, ValueError)):
        with pytest.raises(kind, match="priority"):
            parse_priority(bad, 2)


def test_outputs_longer_than_the_context_end_with_it():
    fits, longer, least = SamplingParams(max_tokens=9), SamplingParams(max_tokens=11), SamplingParams(max_tokens=None)
    held = shortened([longer, fits, longer, least], 10)
    assert [each.max_tokens for each in held] == [10, 9, 10, None] and longer.max_tokens == 11
    assert held[0] is held[2] and held[1] is fits and held[3] is least
    for least in (11, None):
        longer.min_tokens = least
        with pytest.raises(ValueError, match="min_tokens must be"):
            shortened([longer], 10)


def test_processors_by_name():
    name = f"{json.loads.__module__}:loads"
    assert processor_names([json.loads, "any.module:name"]) == [name, "any.module:name"] and name == "json:loads"
    assert processor_names(None) == processor_names(()) == []
    for bad, kind in [
        ("json:loads", TypeError),
        (json.loads, TypeError),
        ([5], TypeError),
        ([json.JSONDecoder], TypeError),  # such as vLLM's own, which would act on every request
        ([lambda x: x], ConfigError),
    ]:
        with pytest.raises(kind, match="logits"):
            processor_names(bad)

    def local(ids, logits):
        return logits

    with pytest.raises(ConfigError, match="cannot be imported by the workers; put it into a module"):
        processor_names([local])
    local.__qualname__, local.__module__ = "loads", "json"
    with pytest.raises(ConfigError, match="json:loads is not the logits processor that was given"):
        processor_names([local])
    local.__module__ = "no_such_module"
    with pytest.raises(ConfigError, match="no_such_module:loads is not"):
        processor_names([local])
    local.__module__ = "__main__"
    with pytest.raises(ConfigError, match="__main__:loads cannot be imported"):
        processor_names([local])


def test_a_child_finds_what_this_process_finds(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    assert import_path() == str(tmp_path)


# ---------------------------------------------------------------- beam search


def test_beam_search_is_a_request_like_others():
    params = BeamSearchParams(4, 30, length_penalty=0.5, ignore_eos=True).sampling(20)
    assert (params.n, params.width, params.use_beam_search, params.early_stopping) == (4, 4, True, "never")
    assert (params.length_penalty, params.logprobs, params.ignore_eos, params.max_tokens) == (0.5, 8, True, 30)
    assert BeamSearchParams(beam_width=16, max_tokens=1, include_stop_str_in_output=True).sampling(20).logprobs == 20
    form = StructuredOutputsParams(regex="a+")
    one = BeamSearchParams(1, 2, structured_outputs=form).sampling(20)
    assert one.greedy and not one.use_beam_search and one.logprobs == 2 and one.structured_outputs is form


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, r"beam_width must be in \[1, 64\], got 0"),
        ({"beam_width": 65}, "beam_width must be in"),
        ({"beam_width": True}, "beam_width must be an integer, got True"),
        ({"max_tokens": 0}, "max_tokens must be in"),
        ({"max_tokens": None}, "max_tokens must be an integer"),
        ({"temperature": 0.5}, r"temperature must be 0 when using beam search\. Got 0\.5\."),
        ({"temperature": "x"}, "temperature must be a finite number"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number, got nan"),
        ({"length_penalty": True}, "length_penalty must be a finite number"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output must be true or false"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs must be StructuredOutputsParams, got dict"),
    ],
)
def test_bad_beam_search_params(fields, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, **fields})


class Words:
    def decode(self, tokens):
        return " ".join(map(str, tokens))


def test_what_beam_search_returns():
    logprobs = [{3: Logprob(-1.0, 1, "c")}, {4: Logprob(-2.0, 2, "d")}]
    child = CompletionOutput(0, "cd", [3, 4], -3.0, logprobs, "stop", 9)
    output = RequestOutput("0", "ab", [1, 2], outputs=[child])
    (found,) = beam_output(output, Words()).sequences
    assert (found.tokens, found.text, found.cum_logprob, found.logprobs) == ([1, 2, 3, 4], "1 2 3 4", -3.0, logprobs)
    assert (found.finish_reason, found.stop_reason) == ("stop", 9)
    assert beam_output(output, None).sequences[0].text is None


# ---------------------------------------------------------------- outputs and metrics


def test_printed_as_in_the_documents():
    child = CompletionOutput(0, "hi", [5, 2], 0.0, None, "stop")
    times = RequestMetrics(1.0, 5.0, 2.0, 3.0, 1.0, 6.0)
    assert repr(RequestOutput(0, "a", [1], None, [child], metrics=times)) == (
        "RequestOutput(request_id=0, prompt='a', prompt_token_ids=[1], prompt_logprobs=None, "
        "outputs=[CompletionOutput(index=0, text='hi', token_ids=[5, 2], cumulative_logprob=0.0, logprobs=None, "
        "finish_reason=stop)], finished=True, metrics=RequestMetrics(arrival_time=1.0, last_token_time=5.0, "
        "first_scheduled_time=2.0, first_token_time=3.0, time_in_queue=1.0, finished_time=6.0), lora_request=None)"
    )
    assert (times.scheduler_time, times.model_forward_time, times.model_execute_time) == (None, None, None)


def test_metrics_count_what_has_ended():
    recorder = Recorder("m")
    children = [CompletionOutput(0, "", [1] * 5, finish_reason="stop"), CompletionOutput(1, "", [], finish_reason="x")]
    times = RequestMetrics(1.0, 5.0, 2.0, 3.0, 1.0, 6.0)
    recorder.add(RequestOutput("0", None, [1, 2, 3], outputs=children, metrics=times))
    recorder.add(RequestOutput("1", None, [1], outputs=[CompletionOutput(0, "", [1], finish_reason="stop")]))
    stats = Stats(0, 1, 2, 8, 4, 5, 6, 7, 8, 9, 10, 11, [])
    found = {(each.name, each.labels.get("finished_reason")): each for each in recorder.metrics(stats)}
    assert found["quire:kv_cache_usage_perc", None] == Gauge("quire:kv_cache_usage_perc", {"model_name": "m"}, 0.5)
    assert found["quire:generation_tokens", None] == Counter("quire:generation_tokens", {"model_name": "m"}, 9)
    assert found["quire:request_success", "stop"].value == 2 and found["quire:request_success", "x"].value == 1
    lengths = found["quire:request_generation_tokens", None]
    assert isinstance(lengths, Histogram) and (lengths.count, lengths.sum) == (2, 6.0)
    assert (lengths.buckets["1.0"], lengths.buckets["2.0"], lengths.buckets["+Inf"]) == (1, 1, 2)
    assert found["quire:request_time_per_output_token_seconds", None].sum == 0.5
    assert found["quire:time_to_first_token_seconds", None].sum == 2.0
    assert found["quire:e2e_request_latency_seconds", None].sum == 5.0
