"""One process of the groups that ``test_parallel`` checks, without links and scheduler: `parallel_rank.py FOLDER RANK`.

FOLDER/jobs.json lists models and how each is split; every process writes what it has seen of each to FOLDER/RANK.json.
``script`` is what is done with a model, here and in the one process that is compared with.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from worker_toys import CPU, GREEDY, Hand, prompts

from quire.gpu_worker.models.kv_scales import scales_to_read, set_scales
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.params import SamplingParams

SEEDED = SamplingParams(temperature=0.9)
FILTERED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, frequency_penalty=0.5)
TOLD = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)
LENGTH, CHUNK = 96, 24
FP8_CACHES = {"llama-bias-tied", "gemma2"}
"""Models whose cache is fp8, with measured scales."""


def load(folder, group=None):
    config = load_model_config(str(folder), LENGTH)
    model = load_model(config, torch.float32, CPU, group=group)
    if folder.name in FP8_CACHES:
        set_scales(model, torch.float8_e4m3fn, True, scales_to_read(torch.float8_e4m3fn, True), LENGTH)
    return model


def hand_of(model, vocab):
    limits = {"rows": 8, "length": LENGTH, "block_size": 8, "blocks": 64, "max_tokens": 64}
    return Hand(model, **limits, vocab=vocab, dtype=model.cache_dtype)


def script(hand, decodes=6):
    """Prompts in chunks, all kinds of drawing, a fork: every row's tokens as this process has them, and logprobs."""
    kinds = [(GREEDY, {}), (SEEDED, {}), (FILTERED, {}), (TOLD, {"prompt_logprobs_from": 1}), (SEEDED, {})]
    asked = prompts(len(kinds), 5, 40, 300, seed=4)
    told = []

    def run(rows):
        hand.run(*((row, min(CHUNK // len(rows), hand.lengths[row] - hand.done[row])) for row in rows))
        told.append(
            [
                [np.frombuffer(each.values, np.float32).tolist() for each in hand.result.logprobs],
                [np.frombuffer(each.logprobs.values, np.float32).tolist() for each in hand.result.prompts],
            ]
        )

    for first in (0, 2, 4):  # rows 0 and 1 first, so that a step has the plainest kinds alone
        rows = range(first, min(first + 2, len(kinds)))
        for row in rows:
            params, more = kinds[row]
            hand.admit(row, asked[row], params, seed=10 + row, **more)
        while left := [row for row in rows if hand.done[row] + 1 < hand.lengths[row] or not drawn(hand, row, asked)]:
            run(left)
        for _ in range(decodes // 3):
            run(rows)
    hand.fork(1, 6, seed=99)
    hand.tables[6], hand.lengths[6], hand.done[6] = list(hand.tables[1]), hand.lengths[1], hand.done[1]
    if hand.done[1] % hand.block_size:
        hand.copy_block(6, len(hand.tables[6]) - 1)
    for _ in range(decodes):
        run([0, 1, 2, 3, 4, 6])
    return {"tokens": [hand.state.tokens[row, : hand.lengths[row]].tolist() for row in hand.lengths], "told": told}


def drawn(hand, row, asked):
    return hand.lengths[row] > len(asked[row])


def main(folder, number):
    import torch.distributed as dist

    from quire.gpu_worker.parallel.parallel import Ranks, shard_of
    from quire.gpu_worker.parallel.rendezvous import _stay_on_loopback
    from quire.gpu_worker.runner import Runner
    from quire.gpu_worker.state import RowState

    _stay_on_loopback()
    seen = {}
    for layout, jobs in json.loads((folder / "jobs.json").read_text()).items():
        size, stages = map(int, layout.split("x"))
        if number >= size * stages:
            continue
        shard = shard_of(number, size, stages)
        group = Ranks(shard, dist.FileStore(str(folder / f"{layout}.store"), size * stages), CPU)
        for row, vocab in jobs:
            model = load(folder / row, group)
            hand = hand_of(model, vocab)
            hand.state = RowState(8, LENGTH, 8, vocab, CPU, draws=group.leader, grammars=hand.state.grammars,
                                  processors=hand.state.processors)  # fmt: skip
            hand.runner = Runner(model, hand.state, hand.kv, 64, group=group)
            hand.drawn_elsewhere = not shard.last
            seen[f"{layout} {row}"] = script(hand)
        dist.barrier()
        dist.destroy_process_group()
    (folder / f"{number}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
