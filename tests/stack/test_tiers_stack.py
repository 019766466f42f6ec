"""Tiers of whole servers: conversations larger than the device's cache, over turns and a restart of everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

CONVERSATIONS = 6
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def talk(llm: LLM, prompts: list[list[int]], turns: int) -> tuple[list[list[int]], list[list[int]], int]:
    """The last answers, what comes next, and how many prompt tokens of the last turn were cached."""
    for turn in range(turns):
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], PARAMS, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in found]
        prompts = [ids + more + [20 + turn] * 5 for ids, more in zip(prompts, answers, strict=True)]
    return answers, prompts, sum(output.num_cached_tokens or 0 for output in found)


def small(**flags: Any) -> LLM:
    """Room for a quarter of the conversations."""
    return LLM(max_model_len=256, num_gpu_blocks_override=20, max_num_seqs=2, **flags)


def test_conversations_come_back_from_host_memory_and_after_a_restart_from_disk(tmp_path: Path) -> None:
    first = [[(7 * i + j * (i + 3)) % 900 + 10 for j in range(150)] for i in range(CONVERSATIONS)]
    with small(kv_cache_dtype="fp8") as llm:
        begun, second, _ = talk(llm, first, 1)
        expected, third, cached = talk(llm, second, 1)
        last, _, _ = talk(llm, third, 1)
        assert cached < 150  # hardly anybody finds what came before
    disk = {"kv_disk_path": str(tmp_path), "kv_disk_size": 0.1}
    with small(kv_cache_dtype="fp8", swap_space=0.1, **disk) as llm:
        assert talk(llm, first, 1)[0] == begun
        answers, _, cached = talk(llm, second, 1)
        assert (answers, cached) == (expected, CONVERSATIONS * 160)
        stats = llm.stats().tiers
        assert stats is not None and stats.host_hits >= CONVERSATIONS * 100 and not stats.failed_loads
    with small(kv_cache_dtype="fp8", **disk) as llm:
        answers, _, cached = talk(llm, third, 1)
        assert answers == last and cached >= CONVERSATIONS * 160
        stats = llm.stats().tiers
        assert stats is not None and stats.disk_hits == cached
