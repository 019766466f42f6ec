"""LLM over the real stack with the demo model."""

import argparse
import asyncio
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import psutil
import pytest
import stack

from quire import LLM, BeamSearchParams, EngineArgs, FlatLogprobs, SamplingParams, StructuredOutputsParams
from quire.client.offline.prompts import parse_conversations, parse_params, parse_priority, parse_prompts
from quire.proto.checkpoint.model_config import demo_model_path

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = ["The capital of France is", "Hello, my name is", "Monday, Tuesday,"]


PROCESSORS = """
def only_seven(output_ids, logits):
    keep = logits[7].clone()
    logits.fill_(float("-inf"))
    logits[7] = keep
    return logits

def breaks(prompt_ids, output_ids, logits):
    raise KeyError(len(prompt_ids))
"""


@pytest.fixture(scope="module")
def processors(tmp_path_factory):
    """A module of logits processors beside the script, as a user has it."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "quire_test_processors.py").write_text(PROCESSORS)
    sys.path.append(str(folder))
    yield importlib.import_module("quire_test_processors")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def llm(processors):
    with LLM(
        dtype="float32",
        seed=5,
        logits_processors=[processors.only_seven],
        logits_processor=[f"{processors.__name__}:breaks"],
    ) as made:
        yield made


def idle(llm):
    """Wait until nothing of ours is left in the scheduler."""
    engine = llm._running._thread.engine

    def nothing_is_left():
        try:
            stats = llm._running._thread.run(engine.stats()).result()
        except TimeoutError:  # asked of a scheduler that has just been killed
            return False
        return not (engine.open_requests or stats.running or stats.waiting or stats.blocks_used)

    stack.wait_until(nothing_is_left, "nothing is left", 120)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


# ---------------------------------------------------------------- what comes out


@pytest.mark.slow
def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = [f"{i} and {'so on and ' * (i % 7)}" for i in range(40)]
    params = [SamplingParams(temperature=0.8, max_tokens=1 + 37 * i % 50, ignore_eos=True) for i in range(40)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [each.max_tokens for each in params]
    ids = [int(output.request_id) for output in outputs]
    assert ids == list(range(ids[0], ids[0] + 40))
    for output in outputs:
        times = output.metrics
        assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time
        assert times.first_token_time <= times.last_token_time <= times.finished_time
        assert times.time_in_queue == times.first_scheduled_time - times.arrival_time
        assert output.finished and output.outputs[0].finish_reason == "length"
    idle(llm)


def test_every_form_of_prompt_gives_the_same(llm):
    tokenizer = llm.get_tokenizer()
    assert llm.get_tokenizer() is llm.get_tokenizer(None) is llm.get_tokenizer(lora_request=None) is tokenizer
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert expected[0].startswith(" Paris")
    assert texts(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)) == expected[:1]
    assert texts(llm.generate(ids[0], GREEDY, use_tqdm=False)) == expected[:1]
    assert texts(llm.generate(ids, [GREEDY] * 3, use_tqdm=False)) == expected
    assert texts(llm.generate(None, GREEDY, ids, use_tqdm=False)) == expected
    assert texts(llm.generate(prompt_token_ids=ids[1], sampling_params=GREEDY, use_tqdm=False)) == expected[1:2]
    assert texts(llm.generate({"prompt": PROMPTS[2]}, GREEDY, use_tqdm=False)) == expected[2:]
    mixed = [PROMPTS[0], {"prompt_token_ids": ids[1]}, {"prompt": "ids win", "prompt_token_ids": tuple(ids[2])}]
    outputs = llm.generate(mixed, (GREEDY, GREEDY, GREEDY), use_tqdm=False)
    assert texts(outputs) == expected
    assert [output.prompt for output in outputs] == [PROMPTS[0], None, "ids win"]
    assert [output.prompt_token_ids for output in outputs] == ids
    assert llm.generate([], GREEDY) == []
    assert texts(llm.generate(inputs=PROMPTS, sampling_params=GREEDY, use_tqdm=False)) == expected
    with pytest.raises(TypeError, match="inputs is another name of prompts"):
        llm.generate("a", inputs="b")


def test_printed_as_in_the_documents(llm):
    (output,) = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    shown = repr(output)
    assert shown.startswith(f"RequestOutput(request_id={output.request_id}, prompt='The capital of France is', ")
    assert ", prompt_logprobs=None, outputs=[CompletionOutput(index=0, text=' Paris" in shown
    assert ", finish_reason=length)], finished=True, metrics=RequestMetrics(arrival_time=" in shown
    assert shown.endswith(", lora_request=None)")


def test_n_children_stop_strings_and_seeds(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=9, max_tokens=20, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    assert [child.index for child in output.outputs] == [0, 1, 2]
    assert len({tuple(child.token_ids) for child in output.outputs}) == 3
    second = SamplingParams(temperature=1.0, seed=10, max_tokens=20, ignore_eos=True)
    assert llm.generate(PROMPTS[1], second, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[1].token_ids
    (free,) = texts(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False))
    stop = SamplingParams(temperature=0, max_tokens=6, stop=[free[3:6]])
    (cut,) = llm.generate(PROMPTS[0], stop, use_tqdm=False)
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == (free[:3], "stop")
    assert cut.outputs[0].stop_reason == free[3:6] and "stop_reason=" in repr(cut)


def test_the_seed_of_llm_makes_its_draws_reproducible(llm):
    params = SamplingParams(temperature=1.0, max_tokens=12)
    llm._random.seed(5)
    first, other = (texts(llm.generate(PROMPTS, params, use_tqdm=False)) for _ in range(2))
    llm._random.seed(5)
    assert texts(llm.generate(PROMPTS, params, use_tqdm=False)) == first != other


def test_default_params_and_max_tokens_none(llm):
    (output,) = llm.generate("One, two, three,", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16
    for most in (None, 9999):
        (output,) = llm.generate([7] * 2040, SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].finish_reason == "length"


def test_chat(llm):
    joke = [{"role": "user", "content": "Tell me a joke."}]
    params = SamplingParams(temperature=0, max_tokens=60)
    (one,) = llm.chat(joke, params, use_tqdm=False)
    assert one.outputs[0].finish_reason == "stop" and "Tell me a joke." in one.prompt
    two = llm.chat([joke, [{"role": "user", "content": "What is the capital of France?"}]], params, use_tqdm=False)
    assert two[0].outputs[0].text == one.outputs[0].text and "Paris" in two[1].outputs[0].text
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        llm.chat(joke, params, chat_template_kwargs={"a": 10**30})
    own = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tail }}"
    (plain,) = llm.chat(
        [{"role": "user", "content": "The capital of France"}], GREEDY, use_tqdm=False, chat_template=own,
        chat_template_kwargs={"tail": " is"},
    )  # fmt: skip
    assert plain.prompt == PROMPTS[0] and plain.outputs[0].text.startswith(" Paris")
    with pytest.raises(ValueError, match="chat template cannot be compiled"):
        llm.chat(joke, params, chat_template="{% if %}")
    with pytest.raises(ValueError, match="chat_template_content_format"):
        llm.chat(joke, params, chat_template_content_format="openai")
    for bad in ([], [[]], "hi", [["hi"]], [{5: "x", **joke[0]}]):
        with pytest.raises(ValueError, match="message"):
            llm.chat(bad, params)


def test_the_progress_bar(llm, capsys):
    llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown and "3/3" in shown
    assert "est. speed input: 0.00 toks/s, output: 0.00 toks/s" in shown and shown.count("toks/s") > 2
    made = []

    def bar(**kwargs):
        from tqdm import tqdm

        made.append(tqdm(**kwargs, disable=True))
        return made[0]

    llm.generate(PROMPTS, GREEDY, use_tqdm=bar)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(made) == 1 and "Processed" not in capsys.readouterr().err


# ---------------------------------------------------------------- logprobs, best_of, beams, processors


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype="float32").eval()

    def logprobs(ids):
        """log_softmax of the logits after each of ``ids`` [len, V]."""
        import torch

        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logprobs


def check_dict(found, token, k, row, tokenizer):
    """One place's dict of logprobs against the reference's log_softmax ``row`` [V]."""
    assert next(iter(found)) == token and k <= len(found) <= k + 1
    best = row.topk(max(k, 1)).values[-1].item()
    for other, logprob in found.items():
        value = row[other].item()
        assert logprob.logprob == pytest.approx(value, abs=1e-4)
        assert other == token or value >= best - 1e-4
        low, high = (row > value + 1e-4).sum().item(), (row > value - 1e-4).sum().item()
        assert low < logprob.rank <= high
        assert logprob.decoded_token == tokenizer.decode([other])


def test_logprobs_are_those_of_transformers(llm, reference):
    tokenizer = llm.get_tokenizer()
    params = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0, max_tokens=5, logprobs=0),
        SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=0),
    ]
    for output, asked in zip(llm.generate(PROMPTS, params, use_tqdm=False), params, strict=True):
        (child,) = output.outputs
        ids = output.prompt_token_ids + child.token_ids
        rows, start = reference(ids), len(output.prompt_token_ids)
        if asked.logprobs is None:
            assert child.logprobs is None and child.cumulative_logprob is None
        else:
            assert len(child.logprobs) == len(child.token_ids)
            for place, found in enumerate(child.logprobs, start):
                check_dict(found, ids[place], asked.logprobs, rows[place - 1], tokenizer)
            own = [found[token].logprob for found, token in zip(child.logprobs, child.token_ids, strict=True)]
            assert child.cumulative_logprob == pytest.approx(sum(own), abs=1e-9)
        if asked.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert len(output.prompt_logprobs) == start and output.prompt_logprobs[0] is None
            for place, found in enumerate(output.prompt_logprobs[1:], 1):
                check_dict(found, ids[place], asked.prompt_logprobs, rows[place - 1], tokenizer)
    assert "logprobs=[{" in repr(output) or "Logprob(logprob=" in repr(output)


def test_best_of_returns_the_best(llm):
    every = SamplingParams(n=5, temperature=1.0, seed=4, max_tokens=10, logprobs=0)
    best = SamplingParams(n=2, best_of=5, temperature=1.0, seed=4, max_tokens=10)
    all_five, two = (llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs for params in (every, best))
    ranked = sorted(all_five, key=lambda child: -child.cumulative_logprob)[:2]
    assert [child.token_ids for child in two] == [child.token_ids for child in ranked]
    assert [child.index for child in two] == [0, 1] and all(child.logprobs is None for child in two)
    assert [c.cumulative_logprob for c in two] == pytest.approx([c.cumulative_logprob for c in ranked], abs=1e-4)


def test_beam_search(llm):
    tokenizer = llm.get_tokenizer()
    prompts = [PROMPTS[0], {"prompt_token_ids": tokenizer.encode(PROMPTS[1])}]
    found = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8), concurrency_limit=1)
    assert [len(each.sequences) for each in found] == [3, 3]
    for prompt, each in zip(PROMPTS, found, strict=False):
        ids = tokenizer.encode(prompt)
        for sequence in each.sequences:
            assert sequence.tokens[: len(ids)] == ids and sequence.text == tokenizer.decode(sequence.tokens)
            new = sequence.tokens[len(ids) :]
            assert len(sequence.logprobs) == len(new) <= 8 and sequence.finish_reason in ("stop", "length")
            own = [each[token].logprob for each, token in zip(sequence.logprobs, new, strict=True)]
            assert sequence.cum_logprob == pytest.approx(sum(own), abs=1e-4)
        eos = tokenizer.eos_token_id
        scores = [s.cum_logprob / (len(s.tokens) - (s.tokens[-1] == eos)) for s in each.sequences]
        assert scores == sorted(scores, reverse=True)
    (one,) = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=1, max_tokens=6))
    assert one.sequences[0].text == PROMPTS[0] + texts(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False))[0]
    shape = StructuredOutputsParams(regex="(red|green|blue)!")  # beams may be the same text by other tokens
    (colours,) = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=30, structured_outputs=shape))
    ends = {tokenizer.decode(s.tokens, skip_special_tokens=True).removeprefix(PROMPTS[0]) for s in colours.sequences}
    assert ends <= {"red!", "green!", "blue!"} and {s.finish_reason for s in colours.sequences} == {"stop"}
    with pytest.raises(TypeError, match="params must be BeamSearchParams"):
        llm.beam_search(PROMPTS, SamplingParams())


def test_processors_are_named(llm, processors):
    name = f"{processors.__name__}:only_seven"
    params = [SamplingParams(max_tokens=4, logits_processors=[name], ignore_eos=True), GREEDY]
    outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == [7] * 4 and outputs[1].outputs[0].token_ids != [7] * 6
    with pytest.raises(RuntimeError, match="quire_test_processors:breaks raised KeyError"):
        llm.generate(PROMPTS[0], SamplingParams(logits_processors=[f"{processors.__name__}:breaks"]), use_tqdm=False)
    idle(llm)
    with pytest.raises(ValueError, match="a Python callable, which cannot be sent"):
        SamplingParams(logits_processors=[processors.only_seven])


def test_metrics_by_name(llm):
    before = {(each.name, str(each.labels)): each for each in llm.get_metrics()}
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    after = {(each.name, str(each.labels)): each for each in llm.get_metrics()}
    assert before.keys() == after.keys()
    rose = {
        name: each.value - before[name, labels].value
        for (name, labels), each in after.items()
        if hasattr(each, "value")
    }
    assert rose["quire:generation_tokens"] >= 18 and rose["quire:num_requests_running"] == 0
    (labels,) = {labels for name, labels in after if name == "quire:request_prompt_tokens"}
    lengths = after["quire:request_prompt_tokens", labels]
    assert lengths.count - before["quire:request_prompt_tokens", labels].count == 3
    assert lengths.buckets["+Inf"] == lengths.count


def test_another_tokenizer(llm, tmp_path):
    from transformers import AutoTokenizer

    first = llm.get_tokenizer()
    expected = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    first.save_pretrained(tmp_path)
    table = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    names = table["model"]["vocab"]
    names["!"], names["?"] = names["?"], names["!"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(table), "utf-8")
    other = AutoTokenizer.from_pretrained(tmp_path)
    shape = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    try:
        llm.set_tokenizer(other)
        assert llm.get_tokenizer() is other
        (output,) = llm.generate("Hello!", GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == other.encode("Hello!") == first.encode("Hello?")
        with pytest.raises(ValueError, match="another vocabulary"):
            llm.generate("yes or no?", shape, use_tqdm=False)
    finally:
        llm.set_tokenizer(first)
    assert texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    with pytest.raises(TypeError, match="must be a transformers tokenizer"):
        llm.set_tokenizer("x")
    (worker,) = (psutil.Process(pid) for pid, name in llm._running.supervisor.pids.items() if name == "gpu_worker")
    busy = threading.Thread(target=llm.generate, args=("x", GREEDY), kwargs={"use_tqdm": False})
    worker.suspend()  # so that it stays busy
    try:
        busy.start()
        stack.wait_until(lambda: llm._running._busy, "it is busy")
        with pytest.raises(RuntimeError, match="cannot be changed while"):
            llm.set_tokenizer(first)
    finally:
        worker.resume()
    busy.join()


@pytest.mark.slow
def test_no_tokenizer_defaults_of_another_kind_and_a_closed_llm(llm):
    ids = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    expected = [output.outputs[0].token_ids[:3] for output in llm.generate(ids, GREEDY, use_tqdm=False)]
    override = {"max_new_tokens": 3, "temperature": 0}
    flags = EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args(
        ["--dtype", "float32", "--skip-tokenizer-init"]
    )
    left_out = dict.fromkeys(("seed", "block_size", "max_num_batched_tokens", "tokenizer_mode"))  # None: the default
    with LLM(**{**vars(flags), **left_out, "override_generation_config": override}) as bare:
        default = bare.get_default_sampling_params()
        assert (default.max_tokens, default.temperature) == (3, 0.0)
        for output, want in zip(bare.generate(ids, use_tqdm=False), expected, strict=True):
            assert output.prompt is None and output.outputs[0].text == "" and output.outputs[0].token_ids == want
        (output,) = bare.generate(ids[:1], SamplingParams(temperature=0, max_tokens=2, logprobs=1), use_tqdm=False)
        assert all(each.decoded_token is None for each in output.outputs[0].logprobs[0].values())
        with pytest.raises(ValueError, match="Unable to get tokenizer because `skip_tokenizer_init=True`"):
            bare.get_tokenizer()
        for refused in (lambda: bare.generate("text"), lambda: bare.chat([{"role": "user", "content": "x"}])):
            with pytest.raises(ValueError, match="You cannot pass text prompts when `skip_tokenizer_init=True`"):
                refused()
        with pytest.raises(ValueError, match="stop requires a tokenizer"):
            bare.generate(ids, SamplingParams(stop="x"), use_tqdm=False)
        bare.close()
    with pytest.raises(RuntimeError, match="closed"):
        bare.generate(ids)


# ---------------------------------------------------------------- what is refused

REFUSED = [
    ({}, "Either prompts or prompt_token_ids must be provided."),
    (
        {"prompts": ["a"], "prompt_token_ids": [[1], [2]]},
        "The lengths of prompts and prompt_token_ids must be the same.",
    ),
    ({"prompts": ["a", "b"], "sampling_params": [GREEDY]}, "The lengths of prompts and params must be the same."),
    ({"prompts": ["a", "b"], "sampling_params": (GREEDY,)}, "The lengths of prompts and params must be the same."),
    ({"prompts": ["a"], "lora_request": [None, None]}, "The lengths of prompts and lora_request must be the same."),
    ({"prompts": ["a"], "priority": [1, 2]}, "The lengths of prompts and priority must be the same."),
    ({"prompts": ["a", [1, 10**7]]}, "Token id 10000000 is out of vocabulary"),
    ({"prompts": ["a", [-1]]}, "Token id -1 is out of vocabulary"),
    ({"prompts": ["a", [1] * 3000]}, "maximum context length is 2048 tokens"),
    ({"prompts": ["a", {"prompt_token_ids": []}]}, "must not be empty"),
    ({"prompts": ["a"], "lora_request": "x"}, "but LoRA is not enabled"),
    ({"prompts": ["a"], "sampling_params": SamplingParams(stop="\ud800")}, "stop of sampling_params cannot be sent"),
    ({"prompts": ["a", "b"], "sampling_params": [GREEDY, SamplingParams(logprobs=21)]}, "max allowed: 20"),
    ({"prompts": ["a"], "sampling_params": SamplingParams(logits_processors=["x:y"])}, "registered: quire_test_"),
    ({"prompts": {"prompt": "a", "multi_modal_data": {"image": 1}}}, "multi_modal_data is not supported yet"),
    ({"prompts": {"promt": "a"}}, "a prompt has no 'promt'"),
    ({"prompts": {}}, "Either prompts or prompt_token_ids must be provided."),
    # Only the server can tell:
    ({"prompts": ["fine", "word " * 5000, "fine"]}, "maximum context length is 2048 tokens"),
    ({"prompts": ["fine", ""]}, "must not be empty"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=range(len(REFUSED)))
def test_bad_values_leave_nothing_queued(llm, arguments, message):
    with pytest.raises(ValueError) as caught:
        llm.generate(
            **{"sampling_params": SamplingParams(max_tokens=500, ignore_eos=True), **arguments}, use_tqdm=False
        )
    assert message in str(caught.value)
    idle(llm)


ARRAY = numpy.array([1, 2])


@pytest.mark.parametrize("prompts", [5, [None], [b"x"], [["a"]], [1.5], ["a", [1, "b"]], [True], [ARRAY]])
def test_bad_types_of_prompts(prompts):
    with pytest.raises(TypeError, match=r"must be|got"):
        parse_prompts(prompts, None)


def test_what_could_not_be_sent_is_refused_by_name():
    assert parse_priority([numpy.int64(-3), 2**31 - 1], 2) == [-3, 2**31 - 1] and parse_priority(None, 1) == [0]
    for bad, kind in [("x", TypeError), (1.5, TypeError), (True, TypeError), (2**31, ValueError), (2**70, ValueError)]:
        with pytest.raises(kind, match="priority must be"):
            parse_priority([bad], 1)
    with pytest.raises(TypeError, match="priority must be an integer or a list of them, got object"):
        parse_priority(object(), 1)
    for bad in ({5: "x"}, {"a": 10**30}, {"a": object()}, {"content": "\ud800"}):
        with pytest.raises(ValueError, match=r"^messages\[1\] must"):
            parse_conversations([{}, bad])
        with pytest.raises(ValueError, match=r"^messages\[0\]\[1\] must"):
            parse_conversations([[{}, bad]])
    with pytest.raises(ValueError, match=r"^prompt .*surrogate"):
        parse_prompts(["a", "\ud800"], None)


@pytest.mark.parametrize("params", [5, "x", {"n": 1}, [5], [GREEDY, None]])
def test_bad_types_of_params(params):
    with pytest.raises(TypeError):
        parse_params(params, 2 if isinstance(params, list) and len(params) == 2 else 1)


def test_bad_arguments_of_the_constructor():
    with pytest.raises(TypeError, match="'bananas', 'foo'"):
        LLM(foo=1, bananas=2, max_num_seqs=4)
    for arguments, message in [
        ({"generation_config": "/no/such/folder"}, "generation_config='/no/such/folder' must be auto, quire or"),
        ({"override_generation_config": "5"}, "override_generation_config must be a JSON object"),
        ({"logits_processors": [lambda ids, logits: logits]}, "cannot be imported by the workers"),
        ({"tensor_parallel_size": 3}, r"attention heads \(8\) must be divisible by tensor parallel size \(3\)\."),
        ({"quantization": "bananas"}, "Unknown quantization method: bananas"),
        ({"quantization": "awq"}, "Cannot find the config file for awq"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be in"),
        ({"dtype": "float64"}, "Unknown dtype"),
        ({"model": "/no/such/folder"}, "does not exist"),
        ({"max_model_len": 10**6}, "greater than the derived max_model_len"),
    ]:
        with pytest.raises((ValueError, RuntimeError), match=message):
            LLM(**arguments)


# ---------------------------------------------------------------- ways of life


def test_in_threads_and_under_a_running_loop(llm):
    expected = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    got = {}

    def work(number):
        got[number] = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()

    async def notebook():
        return texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))

    assert asyncio.run(notebook()) == expected
    for thread in threads:
        thread.join()
    assert list(got.values()) == [expected] * 3


def test_more_prompts_than_may_wait(llm, monkeypatch):
    monkeypatch.setattr(llm._running, "window", 3)
    outputs = llm.generate([f"{i}" for i in range(20)], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [f"{i}" for i in range(20)]


def test_an_interrupt_aborts_and_the_rest_of_life_goes_on(llm):
    engine = llm._running._thread.engine

    def interrupt():
        while not any(request.children[0].tokens for request in list(engine.core.open.values())):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    kept = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite run behind a shell's & ignores it
    other = threading.Thread(target=interrupt, daemon=True)
    try:
        with pytest.raises(KeyboardInterrupt):
            other.start()
            llm.generate(["a long story"] * 300, SamplingParams(max_tokens=1500, ignore_eos=True), use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, kept)
    other.join()
    idle(llm)
    assert texts(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False))[0].startswith(" Paris")


@pytest.mark.slow
def test_a_tokenizer_object_close_and_collection(llm):
    made = LLM(tokenizer=llm.get_tokenizer(), dtype="float32", disable_log_stats=True)
    assert made.get_tokenizer() is llm.get_tokenizer()
    assert texts(made.generate(PROMPTS, GREEDY, use_tqdm=False)) == texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    stack = made._running.supervisor
    pids, folder = list(stack.pids), stack.run_dir
    assert len(pids) == 3 and os.path.isdir(folder)
    del made
    gc.collect()
    assert not any(map(psutil.pid_exists, pids)) and not os.path.exists(folder)


SCRIPT = """
from quire import LLM, SamplingParams
llm = LLM(dtype="float32")
print(*llm._running.supervisor.pids, llm._running.supervisor.run_dir, flush=True)
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0), use_tqdm=False):
    print(output.outputs[0].text, flush=True)
{}
"""


def run_script(end):
    # A plain script, with no `if __name__ == "__main__"`.
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(end)], stdout=subprocess.PIPE, text=True)
    *pids, folder = process.stdout.readline().split()
    assert process.stdout.readline().startswith(" Paris")
    return process, [int(pid) for pid in pids], Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(3)", 3)])
def test_a_script_that_ends_leaves_nothing(end, code, capfd):
    process, pids, folder = run_script(end)
    assert process.wait(120) == code
    process.stdout.close()
    assert not any(map(psutil.pid_exists, pids)) and not folder.exists()
    assert capfd.readouterr().err == ""  # its results are not lost among lines of the log


@pytest.mark.slow
def test_a_killed_script_leaves_no_process():
    process, pids, folder = run_script("import time; time.sleep(600)")
    children = [psutil.Process(pid) for pid in pids]
    process.kill()
    process.wait()
    process.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
    stack.wait_until(lambda: not folder.exists(), "the run folder's end", 120)


def same_dicts(mine, other):
    """Logprobs of two runs: the tokens agree, the values but for what a sum's order changes."""
    assert (mine is None) == (other is None)
    for one, two in zip(mine or (), other or (), strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            assert next(iter(one)) == next(iter(two))
            values = [sorted(each.logprob for each in found.values()) for found in (one, two)]
            assert values[0] == pytest.approx(values[1], abs=1e-3)


@pytest.fixture(scope="module")
def stories(llm):
    """Prompts, parameters of every kind, and the outputs when nothing dies."""
    prompts = [f"Tell me story number {i}." for i in range(12)]
    kinds = [
        {}, {"logprobs": 2, "prompt_logprobs": 1}, {"n": 2, "logprobs": 0},
        {"n": 2, "best_of": 3}, {"use_beam_search": True, "n": 2, "temperature": 0.0, "logprobs": 1},
    ]  # fmt: skip
    params = [
        SamplingParams(**{"temperature": 1.0, "max_tokens": 40 + 3 * i, "ignore_eos": True, "seed": i, **kinds[i % 5]})
        for i in range(12)
    ]
    return prompts, params, llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize("service", ["detokenizer", "scheduler", "gpu_worker"])
def test_a_killed_process_is_not_noticed(llm, stories, service):
    prompts, params, expected = stories
    engine = llm._running._thread.engine
    over, killed = threading.Event(), []

    def kill():
        while not any(r.children[0].tokens for r in list(engine.core.open.values())):
            if over.wait(0.005):
                return
        for pid, name in llm._running.supervisor.pids.items():
            if name == service:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    while not killed:  # all may be over before a slow machine comes to see that it has begun
        over.clear()
        killer = threading.Thread(target=kill)
        killer.start()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        over.set()
        killer.join()
    for output, undisturbed in zip(outputs, expected, strict=True):
        same_dicts(output.prompt_logprobs, undisturbed.prompt_logprobs)
        for child, other in zip(output.outputs, undisturbed.outputs, strict=True):
            assert (child.token_ids, child.text) == (other.token_ids, other.text)
            assert child.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-2)
            same_dicts(child.logprobs, other.logprobs)
    idle(llm)


def test_the_prefix_cache_is_forgotten_on_demand(llm):
    def cached():
        prompt = {"prompt_token_ids": [11 + n for n in range(40)]}
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    cached()
    assert cached() == 32
    assert llm.reset_prefix_cache() is True
    assert cached() == 0 and cached() == 32
    assert llm.collective_rpc("reset_prefix_cache") == [True] and cached() == 0
    with pytest.raises(ValueError, match="collective_rpc knows sleep, wake_up, reset_prefix_cache, got 'report'"):
        llm.collective_rpc("report")
    with pytest.raises(TypeError, match="no code is sent to workers"):
        llm.collective_rpc(len)


def test_what_programs_for_vllm_read_of_its_engine(llm):
    engine = llm.llm_engine
    config = engine.model_config
    assert config.max_model_len == engine.scheduler_config.max_model_len
    assert config == engine.vllm_config.model_config
    assert config.get_vocab_size() == config.hf_config.vocab_size == llm.get_tokenizer().vocab_size
    assert config.get_hidden_size() == config.hf_text_config.hidden_size
    assert engine.cache_config.block_size == 16 and engine.parallel_config.world_size == 1
    assert engine.get_tokenizer() is llm.get_tokenizer() is engine.tokenizer
    with pytest.raises(AttributeError):
        config.max_model_len = 5


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.5, "seed": 3, "logit_bias": {5: 9.0}}])
def test_named_ids_have_the_logprobs_that_they_have_among_the_best(llm, fields):
    best = SamplingParams(max_tokens=4, logprobs=20, **fields)
    (found,) = llm.generate(PROMPTS[0], best, use_tqdm=False)
    first = list(found.outputs[0].logprobs[0])[1:]
    named = [first[9], first[2], first[5]]
    asked = SamplingParams(max_tokens=4, logprob_token_ids=named, **fields)
    told, plain = llm.generate([PROMPTS[0]] * 2, [asked, best], use_tqdm=False)
    assert told.outputs[0].token_ids == plain.outputs[0].token_ids == found.outputs[0].token_ids
    assert plain.outputs[0].logprobs == found.outputs[0].logprobs
    for token, mine, whole in zip(
        told.outputs[0].token_ids, told.outputs[0].logprobs, plain.outputs[0].logprobs, strict=False
    ):
        assert set(mine) == {token, *named}
        assert mine[token].rank == whole[token].rank
        shared = [each for each in mine if each in whole]
        assert [mine[each].logprob for each in shared] == pytest.approx(
            [whole[each].logprob for each in shared], abs=1e-5
        )
    assert set(told.outputs[0].logprobs[0]) <= set(found.outputs[0].logprobs[0])


def test_flat_logprobs_are_the_same_in_lists(llm):
    asked = {"temperature": 0, "max_tokens": 4, "logprobs": 2, "prompt_logprobs": 1}
    (nested,) = llm.generate(PROMPTS[0], SamplingParams(**asked), use_tqdm=False)
    (found,) = llm.generate(PROMPTS[0], SamplingParams(**asked, flat_logprobs=True), use_tqdm=False)
    flat, want = found.outputs[0].logprobs, nested.outputs[0].logprobs
    assert isinstance(flat, FlatLogprobs) and list(flat) == want and flat[-1] == want[-1] and len(flat) == 4
    assert flat[1:3] == FlatLogprobs.of(want[1:3])
    assert [flat.token_ids[at] for at in flat.start_indices] == found.outputs[0].token_ids
    assert flat.logprobs[flat.start_indices[2]] == want[2][found.outputs[0].token_ids[2]].logprob
    assert nested.prompt_logprobs[0] is None and found.prompt_logprobs[0] == {}
    assert list(found.prompt_logprobs)[1:] == nested.prompt_logprobs[1:]
    for change in (lambda: flat.insert(0, {}), lambda: flat.pop(), lambda: flat.__setitem__(0, {})):
        with pytest.raises(TypeError, match="FlatLogprobs"):
            change()
    with pytest.raises(TypeError, match="integer or a slice"):
        flat["a"]
