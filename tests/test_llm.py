"""LLM over the real stack with the demo model."""

import asyncio
import gc
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

from quire import LLM, SamplingParams
from quire.client.prompts import check_params, parse_conversations, parse_params, parse_priority, parse_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = ["The capital of France is", "Hello, my name is", "Monday, Tuesday,"]


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", seed=5) as made:
        yield made


def idle(llm):
    """Wait until nothing of ours is left in the scheduler."""
    engine = llm._running._thread.engine
    deadline = time.monotonic() + 20
    while True:
        stats = llm._running._thread.run(engine.stats()).result()
        if not (engine.open_requests or stats.running or stats.waiting or stats.blocks_used):
            return
        assert time.monotonic() < deadline, stats
        time.sleep(0.02)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


# ---------------------------------------------------------------- what comes out


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
    assert llm.get_tokenizer() is tokenizer
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
    (output,) = llm.generate([7] * 2040, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8


def test_chat(llm):
    joke = [{"role": "user", "content": "Tell me a joke."}]
    params = SamplingParams(temperature=0, max_tokens=60)
    (one,) = llm.chat(joke, params, use_tqdm=False)
    assert one.outputs[0].finish_reason == "stop" and "Tell me a joke." in one.prompt
    two = llm.chat([joke, [{"role": "user", "content": "What is the capital of France?"}]], params, use_tqdm=False)
    assert two[0].outputs[0].text == one.outputs[0].text and "Paris" in two[1].outputs[0].text
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        llm.chat(joke, params, chat_template_kwargs={"a": 10**30})
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
    ({"prompts": ["a"], "sampling_params": SamplingParams(max_tokens=9999)}, "max_tokens=9999 cannot be greater"),
    ({"prompts": ["a"], "lora_request": "x"}, "lora_request is not supported yet"),
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
    with pytest.raises(TypeError, match="priority must be a list"):
        parse_priority(1, 1)
    for bad in ({5: "x"}, {"a": 10**30}, {"a": object()}, {"content": "\ud800"}):
        with pytest.raises(ValueError, match=r"^messages\[1\] must"):
            parse_conversations([{}, bad])
        with pytest.raises(ValueError, match=r"^messages\[0\]\[1\] must"):
            parse_conversations([[{}, bad]])
    with pytest.raises(ValueError, match=r"^prompt .*surrogate"):
        parse_prompts(["a", "\ud800"], None)
    with pytest.raises(ValueError, match=r"^stop of sampling_params"):
        check_params([GREEDY, SamplingParams(stop="\ud800")])


@pytest.mark.parametrize("params", [5, "x", {"n": 1}, [5], [GREEDY, None]])
def test_bad_types_of_params(params):
    with pytest.raises(TypeError):
        parse_params(params, 2 if isinstance(params, list) and len(params) == 2 else 1)


def test_bad_arguments_of_the_constructor():
    with pytest.raises(TypeError, match="'bananas', 'foo'"):
        LLM(foo=1, bananas=2, max_num_seqs=4)
    for arguments, message in [
        ({"skip_tokenizer_init": True}, "skip_tokenizer_init=True is not supported yet"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported yet"),
        ({"quantization": "awq"}, "quantization='awq' is not supported yet"),
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
    timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a long story"] * 300, SamplingParams(max_tokens=1500, ignore_eos=True), use_tqdm=False)
    timer.join()
    idle(llm)
    assert texts(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False))[0].startswith(" Paris")


def test_a_tokenizer_object_close_and_collection(llm):
    made = LLM(tokenizer=llm.get_tokenizer(), dtype="float32", disable_log_stats=True)
    assert made.get_tokenizer() is llm.get_tokenizer()
    assert texts(made.generate(PROMPTS, GREEDY, use_tqdm=False)) == texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    stack = made._running.stack
    pids, folder = list(stack.pids), stack.run_dir
    assert len(pids) == 3 and os.path.isdir(folder)
    del made
    gc.collect()
    assert not any(map(psutil.pid_exists, pids)) and not os.path.exists(folder)


SCRIPT = """
from quire import LLM, SamplingParams
llm = LLM(dtype="float32")
print(*llm._running.stack.pids, llm._running.stack.run_dir, flush=True)
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


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_a_script_that_ends_leaves_nothing(end, code):
    process, pids, folder = run_script(end)
    assert process.wait(30) == code
    process.stdout.close()
    assert not any(map(psutil.pid_exists, pids)) and not folder.exists()


def test_a_killed_script_leaves_no_process():
    process, pids, folder = run_script("import time; time.sleep(600)")
    process.kill()
    process.wait()
    process.stdout.close()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not alive
    for path in sorted(folder.glob("**/*"), reverse=True):
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("service", ["detokenizer", "scheduler", "gpu_worker"])
def test_a_killed_process_is_not_noticed(llm, service):
    prompts = [f"Tell me story number {i}." for i in range(16)]
    params = [SamplingParams(temperature=1.0, max_tokens=60 + 5 * i, ignore_eos=True, seed=i) for i in range(16)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    engine = llm._running._thread.engine

    def kill():
        while not any(r.children[0].tokens for r in list(engine._open.values())):
            time.sleep(0.005)
        for pid, name in llm._running.stack.pids.items():
            if name == service:
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    killer.join()
    assert texts(outputs) == texts(expected)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    idle(llm)


def test_a_closed_llm_says_so():
    made = LLM()
    made.close()
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.generate("a")
