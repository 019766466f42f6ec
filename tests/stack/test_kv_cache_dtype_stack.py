"""Whole servers over an fp8 cache: a killed worker changes no stream, as its scales are measured alike."""

from __future__ import annotations

import threading

import psutil

from quire import LLM, SamplingParams

PROMPTS = ["Once upon a time " * 20 + str(number) for number in range(12)]
GREEDY = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


def answers(kill: bool, **flags) -> list[list[int]]:
    """Greedy tokens; with ``kill`` the worker is killed while they are made."""
    with LLM(dtype="float32", kv_cache_dtype="fp8", calculate_kv_scales=True, **flags) as llm:
        workers = [
            each for each in psutil.Process().children(recursive=True) if "gpu_worker" in " ".join(each.cmdline())
        ]
        timer = threading.Timer(0.5, workers[0].kill)
        if kill:
            timer.start()
        try:
            found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        finally:
            timer.cancel()
        assert not kill or not workers[0].is_running()
        return [list(each.outputs[0].token_ids) for each in found]


def test_a_killed_worker_changes_no_stream_over_an_fp8_cache():
    assert answers(True, max_num_batched_tokens=280) == answers(False)
