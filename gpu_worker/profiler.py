"""torch's profiler over this process's steps, from an administrator's /start_profile to /stop_profile."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..proto.messages import Profile, Profiled
from ..proto.profiler import profiler_config

if TYPE_CHECKING:
    from .parallel import group_link

log = logging.getLogger(__name__)


class Profiler:
    """Records between steps' ends: it begins and ends where no step runs."""

    def __init__(self, config: str | None, number: int, device: torch.device):
        """``number`` is this process's within its replica; ``config`` is --profiler-config."""
        self._config, self._number, self._device = profiler_config(config), number, device
        self._running: Any = None

    def follow(self, message: Profile, link: Any, others: group_link.Leader | None) -> None:
        """Begin or end, and answer for all processes of the replica, whose leader has passed the message on."""
        error = self._change(message.on)
        if others is not None:
            error = next(filter(None, [error, *(each.error for each in others.collect(Profiled, message.lease))]), "")
        link.send(Profiled(message.lease, error))

    def _change(self, on: bool) -> str:
        """What was wrong, in one line; "" for nothing. What is so already is nothing wrong."""
        if self._config is None:
            return "the workers have no folder for traces; start the server with --profiler-config."
        try:
            if on and self._running is None:
                self._running = self._begun()
            elif not on and self._running is not None:
                self._write()
        except (OSError, RuntimeError) as error:
            self._running = None
            return f"torch's profiler: {type(error).__name__}: {error}"[:600]
        return ""

    def _begun(self) -> Any:
        config = self._config
        assert config is not None
        Path(config.torch_profiler_dir).mkdir(parents=True, exist_ok=True)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        running = torch.profiler.profile(
            activities=kinds, with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops, record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
        )  # fmt: skip
        running.start()
        log.info("torch's profiler records")
        return running

    def _write(self) -> None:
        """End it. A trace's name says the process and the time, so that none is written over another."""
        running, self._running, config = self._running, None, self._config
        assert config is not None
        running.stop()
        ending = ".pt.trace.json" + (".gz" if config.torch_profiler_use_gzip else "")
        name = f"quire-rank{self._number}-{os.getpid()}-{time.time_ns() // 1_000_000}{ending}"
        running.export_chrome_trace(str(Path(config.torch_profiler_dir) / name))
        log.info("torch's profiler wrote %s", Path(config.torch_profiler_dir) / name)
