"""The codec, sockets and flags: what crosses a wire arrives whole, what should not cross is dropped and counted."""

import argparse
import asyncio
import pickle
import random
import subprocess
import sys

import pytest
import zmq

from quire.proto import codec, config, hashing
from quire.proto import messages as m
from quire.proto.params import SamplingParams
from quire.proto.process import new_incarnation
from quire.proto.wire import sockets
from quire.proto.work import Generate

PLAN = m.StepPlan(
    lease=m.Lease(1, 2, 3), step=4, rows=codec.i32([0, 5]), starts=codec.i32([7, 0]), counts=codec.i32([1, 16]),
    admits=[m.Admit(row=5, uid=2**40, index=1, ids=codec.i32(range(16)), prompt_len=16,
                    work=Generate(SamplingParams(top_p=0.9), 2**64 - 1))],
)  # fmt: skip


def test_columns_round_trip_and_refuse_a_torn_one():
    assert codec.from_i32(codec.i32([-1, 0, 2**31 - 1])) == [-1, 0, 2**31 - 1]
    assert codec.from_i64(codec.i64([2**62])) == [2**62]
    assert codec.from_u64(codec.u64([2**64 - 1])) == [2**64 - 1]
    assert codec.from_i8(codec.i8([-1, 4])) == [-1, 4]
    with pytest.raises(codec.BadFrame, match="3 bytes"):
        codec.from_i32(b"abc")


def test_a_message_round_trips_in_its_union_only():
    decode = codec.Decoder(m.FromSchedulerWorkers)
    assert decode(codec.encode(PLAN)) == PLAN
    with pytest.raises(codec.BadFrame):
        codec.Decoder(m.ToSchedulerWorkers)(codec.encode(PLAN))


def test_hostile_bytes_are_bad_frames_and_nothing_else():
    decoders = [
        codec.Decoder(u) for u in (m.ToDetokenizer, m.ToSchedulerFront, m.ToSchedulerWorkers, m.FromDetokenizer)
    ]
    rng = random.Random(0)
    frames = [b"", pickle.dumps({"a": 1}), b"\xc1", b"\x91" * 5000, codec.encode(PLAN)[:-3], codec.encode(["Submit"])]
    frames += [rng.randbytes(rng.randrange(200)) for _ in range(2000)]
    good = codec.encode(m.Heartbeat())
    frames += [good[:i] + bytes([rng.randrange(256)]) + good[i + 1 :] for i in range(len(good)) for _ in range(20)]
    for frame in frames:
        for decode in decoders:
            try:
                decode(frame)
            except codec.BadFrame:
                pass


def test_block_hashes_are_chained_and_salted():
    ids = codec.i32(range(40))
    first, second = hashing.hash_blocks(ids, 16)
    assert len(hashing.hash_blocks(ids, 16)) == 2 and len(first) == 16
    assert hashing.hash_block(first, ids[64:128]) == second
    assert hashing.root_of("") == hashing.ROOT
    salted = [hashing.hash_blocks(ids, 16, hashing.root_of(salt)) for salt in ("a", "b", "a")]
    assert salted[0] == salted[2] and len({first, second, *salted[0], *salted[1]}) == 6
    assert hashing.hash_blocks(codec.i32([9, *range(1, 40)]), 16)[1] != second


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


def talk(endpoint, server_keys, client_keys, context, wait=60.0):
    """One message there and one back; None where the client never gets through."""

    async def run():
        router = sockets.Router(m.ToSchedulerFront, endpoint, server_keys, context)
        arrived, answered = asyncio.Queue(), asyncio.Queue()
        router.attach(lambda peer, message: (arrived.put_nowait(message), router.send(peer, m.Heartbeat(last_step=7))))
        dealer = sockets.Dealer(
            m.FromSchedulerFront, router.endpoint, new_incarnation("frontend"), client_keys, context
        )
        dealer.attach(answered.put_nowait)
        try:
            dealer.socket.send(pickle.dumps("no"), zmq.NOBLOCK)
            dealer.socket.send_multipart([b"two", b"frames"], zmq.NOBLOCK)
            dealer.send(m.GetStats(token=3))
            await asyncio.wait_for(arrived.get(), wait)
            return await asyncio.wait_for(answered.get(), wait), router.bad_frames, router.send("nobody", m.Heartbeat())
        except (TimeoutError, zmq.Again):  # Again: ZeroMQ has closed the connection that was refused
            return None
        finally:
            dealer.close()
            router.close()

    return asyncio.run(run())


def test_bad_frames_are_counted_and_a_vanished_peer_is_told(tmp_path, context):
    folder = sockets.private_dir(str(tmp_path / "q"))
    assert talk(f"ipc://{folder}/x", None, None, context) == (m.Heartbeat(last_step=7), 2, False)


def test_curve_lets_in_only_the_deployments_key():
    keys = sockets.Keys.generate()
    context = zmq.Context.instance()
    assert talk("tcp://127.0.0.1:*", keys, keys, context) == (m.Heartbeat(last_step=7), 2, False)
    assert talk("tcp://127.0.0.1:*", keys, None, context, wait=0.5) is None
    stranger = sockets.Keys.generate()
    half = sockets.Keys(stranger.public, stranger.secret)
    assert talk("tcp://127.0.0.1:*", keys, half, context, wait=0.5) is None


def test_plain_tcp_off_loopback_is_refused():
    with pytest.raises(config.ConfigError, match="needs --keys"):
        sockets.Router(m.ToSchedulerFront, "tcp://0.0.0.0:5999")


def test_key_files_are_private(tmp_path):
    path = str(tmp_path / "keys")
    keys = sockets.Keys.generate()
    keys.save(path)
    assert sockets.Keys.load(path).secret == keys.secret
    with pytest.raises(FileExistsError):
        keys.save(path)
    (tmp_path / "keys").chmod(0o644)
    with pytest.raises(config.ConfigError, match="chmod 600"):
        sockets.Keys.load(path)
    for path in ("none", "."):
        with pytest.raises(config.ConfigError, match="not a file; make one with `quire keygen"):
            sockets.Keys.load(str(tmp_path / path))


def test_socket_folder_must_be_ours_alone(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(config.ConfigError, match="0700"):
        sockets.private_dir(str(tmp_path / "open"))


def test_no_folders_are_made_on_the_way_to_the_socket_folder(tmp_path):
    with pytest.raises(config.ConfigError, match="cannot be made"):
        sockets.private_dir(str(tmp_path / "no" / "q"))
    assert not (tmp_path / "no").exists()


def test_endpoints():
    assert sockets.front_endpoint("ipc:///r") == "ipc:///r/scheduler.front"
    assert sockets.worker_endpoint("tcp://h:50") == "tcp://h:51"
    for bad in ("tcp://h", "http://h:1", "tcp://:5", "tcp://h:99999"):
        with pytest.raises(config.ConfigError, match="address"):
            sockets.front_endpoint(bad)


def test_flags_reach_the_services_that_name_them():
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    both = parser.parse_args(["--logits-processor", "a:b", "--logits-processor", "c:d", "e:f"])
    assert both.logits_processor == ["a:b", "c:d", "e:f"]
    args = config.EngineArgs(max_num_seqs=4, enable_prefix_caching=False, served_model_name=["a", "b"], model="m")
    assert args.argv_for("scheduler") == ["--max-num-seqs=4", "--no-enable-prefix-caching"]
    assert args.argv_for("frontend") == [
        "--served-model-name=a",
        "--served-model-name=b",
        "--model=m",
        "--max-num-seqs=4",
    ]
    dashes = config.EngineArgs(served_model_name=["-a", "--b_c", "d"])
    passed_on = config.parse_service_args("frontend", dashes.argv_for("frontend"))
    assert passed_on.served_model_name == ["-a", "--b_c", "d"]
    again = config.parse_service_args("scheduler", [*args.argv_for("scheduler"), "--max-num-batched-tokens", "4K"])
    assert (again.max_num_seqs, again.enable_prefix_caching, again.max_num_batched_tokens) == (4, False, 4096)
    assert again.scheduler.startswith("ipc://")
    assert config.parse_service_args("scheduler", ["--max-num-seqs=4096"]).max_num_batched_tokens is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 12}, "8, 16 or 32"), ({"max_num_seqs": 0}, "at least 1"), ({"port": 70000}, "65535"),
        ({"gpu_memory_utilization": 0.0}, r"\(0, 1\]"), ({"tensor_parallel_size": 0}, "at least 1"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "rank": 6}, r"rank must be in \[0, 5\]"),
        ({"quantization": "aqlm"}, "Unknown quantization method: aqlm. Must be one of .'awq', 'gptq'"),
        ({"dtype": "int3"}, "Unknown dtype"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "at least max_num_seqs"),
        ({"max_model_len": 0}, "at least 1"),
    ],
)  # fmt: skip
def test_flags_that_cannot_work_are_refused(change, said):
    with pytest.raises(config.ConfigError, match=said):
        config.EngineArgs(**change).check()


def test_importing_proto_loads_nothing_heavy():
    code = (
        "import sys; from quire.proto import messages, config, process, hashing;"
        "from quire.proto.wire import sockets; from quire.proto.checkpoint import model_config;"
        "print(sorted({'torch', 'numpy', 'transformers', 'tokenizers', 'aiohttp', 'jinja2'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
