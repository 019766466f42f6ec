"""Adapters on a GPU that is not there: steps draw what a CPU's draw, in whatever order streams take, with and without
graphs, and while adapters are loaded."""

from __future__ import annotations

from collections import deque
from typing import Any

import kernel_device  # noqa: F401  # before Triton: its kernels are interpreted here
import numpy as np
import pytest
import tiny_models
import tiny_moe
import torch
from fake_cuda import CUDA
from fake_cuda_models import fake_device, products
from fake_streams import as_late_as_possible, at_random
from lora_toys import install, random_adapter
from worker_toys import CPU, LEASE, Hand, plan

from quire.gpu_worker import recorded
from quire.gpu_worker.lora.slots import LoraSpec
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import load_model_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: test_worker_gpu runs on it")
SLOTS = [0, -1, 1]
ADAPTERS = [(8, lambda name: True), (3, lambda name: "qkv" in name or "experts" in name)]


def model_of(kind: str, folder: Any, device: torch.device) -> Any:
    config = load_model_config(str(folder / kind))
    model = load_model(config, torch.float32, device, lora=LoraSpec(4, 8))
    for slot, (rank, only) in enumerate(ADAPTERS):
        install(model, slot, random_adapter(model, rank, slot, only))
    return model


def generate(model: Any, prompts: list[list[int]], graphs: bool, new: int = 1) -> list[list[int]]:
    """Prompts that come one after another beside decodes. A step is launched before the one before is read, and an
    adapter is loaded between them: of a row that ended, its slot is another adapter's at once."""
    limits = {"rows": 4, "length": 16, "block_size": 16, "blocks": 8, "max_tokens": 16, "vocab": tiny_models.VOCAB}
    hand = Hand(model, device=model.device, **limits)
    if graphs:
        hand.runner.capture(16, progress=False)
    got: list[list[int]] = [[] for _ in range(len(prompts) + 1)]
    flying: deque[Any] = deque()

    def land() -> None:
        rows, outcome = flying.popleft()
        for row, token in zip(rows, np.frombuffer(outcome.result(LEASE, 0).tokens, np.int32).tolist(), strict=True):
            got[row].append(token)

    def later() -> list[None]:
        hand.step += 1
        queued, hand.queue = hand.queue, {}
        flying.append((queued["sample_rows"], hand.runner.launch(plan(hand.step, **queued))))
        while len(flying) > 1:
            land()
        return [None] * len(queued["sample_rows"])

    hand.send = later  # type: ignore[method-assign]
    for row, ids in enumerate(prompts):
        hand.admit(row, ids, slot=SLOTS[row])
        hand.run((row, len(ids)), *[(other, 1) for other in range(row)])
    for _ in range(new):
        hand.run(*[(row, 1) for row in range(len(prompts))])
    hand.drop(2)
    install(model, 1, random_adapter(model, 7, 9))
    hand.admit(3, prompts[2], slot=1)
    hand.run((0, 1), (3, len(prompts[2])))
    while flying:
        land()
    return got


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """Folders of models, and what a CPU draws."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    for kind, module in (("llama", tiny_models), ("mixtral", tiny_moe)):
        prefix, values = module.ROWS[kind][:2]
        tiny_models.write(prefix, folder / kind, 3, {**values, "num_hidden_layers": 1})
        prompts = [ids[:3] for ids in tiny_models.random_prompts(len(SLOTS), seed=4, longest=20)]
        found[kind] = prompts, generate(model_of(kind, folder, CPU), prompts, False)
    return folder, found


@pytest.mark.parametrize(
    ("kind", "order", "graphs"), [("mixtral", as_late_as_possible, False), ("llama", at_random(1), True)]
)
def test_steps_draw_what_the_cpu_draws(
    kind: str, order: Any, graphs: bool, on_cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = on_cpu
    prompts, expected = found[kind]
    monkeypatch.setattr(recorded, "capture_sizes", lambda rows: [rows])  # one of each kind is enough
    with fake_device(values=True, choose=order), products(tiles=False):
        model = model_of(kind, folder, CUDA)
        assert generate(model, prompts, graphs) == expected
        model.adapters.put_away()
        assert not model.adapters.holds(0)


def test_an_adapter_that_is_copied_under_a_step_is_seen(on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy waits for the steps that were launched before its slot was given away."""
    folder, found = on_cpu
    prompts, expected = found["llama"]

    with fake_device(values=True, choose=as_late_as_possible), products(tiles=False):
        model = model_of("llama", folder, CUDA)
        monkeypatch.setattr(model.adapters._stream, "wait_event", lambda event: None)
        assert generate(model, prompts, False) != expected
