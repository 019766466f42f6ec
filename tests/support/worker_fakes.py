"""A scheduler's worker socket for the worker's tests: waits for messages with a deadline, answers by hand."""

import os
import tempfile
import time

from quire.proto.messages import Assign, Configure, Heartbeat, Hello, Lease, Loaded, Ready, ToSchedulerWorkers
from quire.proto.wire.sockets import Router, worker_endpoint

WAIT_S = 120.0

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    "torch_dtype": "float32",
}  # fmt: skip


class FakeScheduler:
    """``address`` is what a worker is given. Heartbeats are counted in ``heartbeats`` and passed over."""

    def __init__(self, folder=None, epoch=1):
        self.folder = folder or tempfile.mkdtemp(prefix="quire-test-")
        self.address = f"ipc://{self.folder}"
        self.router = Router(ToSchedulerWorkers, worker_endpoint(self.address))
        self.epoch, self.counter = epoch, 0
        self.heartbeats = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.router.close()
        for name in os.listdir(self.folder):
            os.unlink(os.path.join(self.folder, name))
        os.rmdir(self.folder)

    def restart(self):
        """Break every connection and listen again under a higher epoch."""
        endpoint = self.router.endpoint
        self.router.socket.unbind(endpoint)  # first, so that nobody whose connection breaks finds the old one again
        self.router.close()
        self.router = Router(ToSchedulerWorkers, endpoint)
        self.epoch += 1

    def get(self, kind=None, peer=None, wait=WAIT_S):
        """The next (peer, message), Heartbeats apart; of ``kind`` and from ``peer`` where given, or AssertionError."""
        deadline = time.monotonic() + wait
        while (left := deadline - time.monotonic()) > 0:
            self.router.socket.poll(int(1000 * left) + 1)
            item = self.router.recv()
            if item is None:
                continue
            if isinstance(item[1], Heartbeat):
                self.heartbeats.append(item[1])
                if kind is Heartbeat:
                    return item
                continue
            assert kind is None or isinstance(item[1], kind), item[1]
            assert peer is None or item[0] == peer, item
            return item
        raise AssertionError(f"no {kind} in {wait} s")

    def send(self, peer, message):
        assert self.router.send(peer, message)

    def lease(self):
        self.counter += 1
        return Lease(self.epoch, 0, self.counter)

    def assign(self, peer, block_size=8, max_num_seqs=8, max_num_batched_tokens=128):
        """Assign and take Loaded: (lease, Loaded)."""
        lease = self.lease()
        self.send(peer, Assign(lease, block_size, max_num_seqs, max_num_batched_tokens))
        loaded = self.get(Loaded, peer)[1]
        assert loaded.lease == lease
        return lease, loaded

    def prepare(self, num_blocks=None, **limits):
        """From Hello to Ready: (peer, Hello, lease)."""
        peer, hello = self.get(Hello)
        lease, loaded = self.assign(peer, **limits)
        self.send(peer, Configure(lease, num_blocks or loaded.num_blocks))
        assert self.get(Ready, peer)[1].lease == lease
        return peer, hello, lease
