"""Every format with every kind of model: the weights' bits, logits, and greedy tokens alone, in company, cut, and after
a worker's death. ``tests/support/quantized.py`` says how a format is added.

What is compared with is transformers' model, in float32, with the values that the format's own package, or its
definition, gives for the weights.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import quantized
import tiny_models
import torch
from family_rig import BUDGET, LENGTH, FamilyRig
from paged_runner import CPU, PagedRunner, Row
from stack import Server
from thread_ranks import Threads, on_ranks

from quire.gpu_worker.layers.formats.plain import Plain
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.models.parts import Parts, _by_expert
from quire.proto.checkpoint.model_config import load_model_config

TOKENS = 48
WRITERS = quantized.writers()
CASES = [(name, model) for name, writer in WRITERS.items() for model in writer.models]


class Folders:
    """Checkpoints, each written once: a format's of a model, and the float one that it stands for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def plain(self, model: str) -> Path:
        folder = self.root / model
        return folder if folder.is_dir() else quantized.plain(model, folder)

    def of(self, name: str, model: str) -> tuple[Path, Path]:
        folder, twin = (self.root / f"{model}-{name}{end}" for end in ("", "-float"))
        if not twin.is_dir():
            WRITERS[name].write(self.plain(model), folder)
            quantized.float_twin(WRITERS[name], self.plain(model), folder, twin)
        return folder, twin


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("quantized"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The float32 value of every weight that is loaded from now on, by the decoder's name for it."""
    found: dict[str, torch.Tensor] = {}
    make = Parts._make

    def kept(parts: Parts, parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
        weight = parameter.as_weight(torch.float32, CPU)
        format = parts.formats.get(parameter.name) or Plain()
        apart = {k: v if weight.experts is None else _by_expert(v, weight.experts) for k, v in tensors.items()}
        found[parameter.name] = format.dequantize(apart, weight).clone()
        make(parts, parameter, tensors)

    monkeypatch.setattr(Parts, "_make", kept)
    return found


def best(reference: Any, prompts: list[list[int]], outputs: list[list[int]], ties: float = 0.0) -> list[list[int]]:
    """The greedy tokens of ``reference`` behind each prompt, where ``outputs`` are: one pass gives what decoding token
    by token would, as far as it agrees with them. An output whose logit is within ``ties`` of the largest, as a share
    of it, is as good as the best.
    """
    whole = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    ids = torch.tensor([row + [0] * (max(map(len, whole)) - len(row)) for row in whole])
    with torch.inference_mode():
        logits = reference(ids).logits[:, :-1]
    most, found = logits.max(-1)
    near = logits.gather(-1, ids[:, 1:, None])[..., 0] >= most - ties * most.abs()
    found = torch.where(near, ids[:, 1:], found) if ties else found
    return [
        row[len(prompt) - 1 :][: len(output)].tolist()
        for prompt, output, row in zip(prompts, outputs, found, strict=True)
    ]


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest, as a share of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize(("name", "model"), CASES)
def test_weights_logits_and_tokens_are_the_formulas(
    name: str, model: str, folders: Folders, made: dict[str, torch.Tensor]
) -> None:
    folder, twin = folders.of(name, model)
    embedding = load_model(load_model_config(str(twin), LENGTH), torch.float32, CPU).embed
    want, _ = {"embed.weight": embedding, **made}, made.clear()
    rig = FamilyRig(folder)
    assert want.keys() - made.keys() <= {"embed.weight"}  # which is plain in most files
    assert [key for key in made if not torch.equal(want[key].flatten(), made[key].flatten())] == []

    reference = quantized.reference(WRITERS[name], twin)
    prompts = tiny_models.random_prompts(12, seed=6)
    prompts += [prompts[0] * 2 + prompt for prompt in prompts[1:5]]  # equal prefixes, for the prefix cache
    alone = rig.greedy(prompts[:1], TOKENS)
    assert alone == best(reference, prompts[:1], alone, WRITERS[name].ties)
    before = rig.hits
    together = rig.greedy(prompts, TOKENS)  # 16 rows, in steps of BUDGET tokens
    assert together == best(reference, prompts, together, WRITERS[name].ties)
    assert rig.hits > before and rig.worker.chunks and max(map(len, prompts)) > BUDGET

    with torch.inference_mode():
        logits = reference(torch.tensor([prompts[1]])).logits[0]
    (got,) = rig.prompt_logits(prompts[1:2])
    assert difference(got, logits[: len(got)]) < WRITERS[name].logits


@pytest.mark.parametrize("name", [name for name, model in CASES if model == "grouped"])
def test_two_tensor_ranks_give_the_same_tokens(name: str, folders: Folders) -> None:
    folder, twin = folders.of(name, "grouped")
    (prompt,) = tiny_models.random_prompts(1, seed=8, shortest=40, longest=60)

    def greedy(group: Threads) -> tuple[list[int], torch.Tensor]:
        model = load_model(load_model_config(str(folder), LENGTH), torch.float32, CPU, group=group)
        runner, row = PagedRunner(model), Row(list(prompt))
        first = None
        while len(row.tokens) < len(prompt) + TOKENS:
            logits = group.all_columns(runner.step([(row, len(row.tokens) - row.computed)]))
            first = logits if first is None else first
            row.tokens.append(int(logits[-1].argmax()))
        return row.tokens[len(prompt) :], first

    reference = quantized.reference(WRITERS[name], twin)
    with torch.inference_mode():
        want = reference(torch.tensor([prompt])).logits[0]
    for tokens, logits in on_ranks(2, greedy):
        assert difference(logits, want) < WRITERS[name].logits
        assert [tokens] == best(reference, [prompt], [tokens])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, model in CASES if model == "llama" and WRITERS[name].served])
def test_a_killed_worker_changes_no_token(name: str, folders: Folders) -> None:
    folder, twin = folders.of(name, "llama")
    (prompt,) = tiny_models.random_prompts(1, seed=9, shortest=30, longest=30)
    server = Server(str(folder), "--dtype=float32", "--max-model-len=512", "--cpu-threads=1")
    try:
        killed = worker_of(server)
        body = {"prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        tokens = stream(server, body, after_first=killed.kill)
        assert worker_of(server).pid != killed.pid  # which has loaded the model anew, and gone on
    finally:
        server.close()
    assert len(tokens) == 400
    assert [tokens] == best(quantized.reference(WRITERS[name], twin), [prompt], [tokens])


def worker_of(server: Server) -> psutil.Process:
    return next(child for child in server.children() if "quire.gpu_worker" in child.cmdline())


def stream(server: Server, body: dict[str, Any], after_first: Callable[[], None]) -> list[int]:
    """The token ids of a streamed completion; ``after_first`` is called once when the first have come."""
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    tokens: list[int] = []
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: {"):
                told = json.loads(line[6:])
                assert "error" not in told, told
                first = not tokens
                tokens += told["choices"][0]["token_ids"] if told["choices"] else []
                if first:
                    after_first()
    return tokens
