"""One GGUF file in llama.cpp's Python package: what `parts/llamacpp.py` starts with the interpreter that has it.

    python bench/llamacpp_run.py < settings.json

Reads file, threads, prompts (lists of token ids) and tokens; writes, for each prompt, the seconds of its prefill and
of each token after the first. It imports nothing of quire's.
"""

from __future__ import annotations

import itertools
import json
import sys
import time


def main() -> None:
    """Run all prompts, one after the other."""
    from llama_cpp import Llama

    asked = json.load(sys.stdin)
    longest = max(len(prompt) for prompt in asked["prompts"]) + asked["tokens"]
    threads = asked["threads"]
    model = Llama(asked["file"], n_ctx=longest + 8, n_batch=512, n_threads=threads, n_threads_batch=threads,
                  verbose=False)  # fmt: skip
    runs = []
    for prompt in asked["prompts"]:
        model.reset()
        began = time.perf_counter()
        model.eval(prompt)
        token = model.sample(temp=0.0)
        times = [time.perf_counter()]
        for _ in range(asked["tokens"] - 1):
            model.eval([token])
            token = model.sample(temp=0.0)
            times.append(time.perf_counter())
        gaps = [after - before for before, after in itertools.pairwise(times)]
        runs.append({"prefill": times[0] - began, "gaps": gaps})
    json.dump(runs, sys.stdout)


if __name__ == "__main__":
    main()
