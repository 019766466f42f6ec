"""Adapters on the wire: nothing where there are none, everything that a worker needs where there are."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from adapter_folders import adapter_folder

from quire.proto.checkpoint.adapter_files import adapter_digest
from quire.proto.codec import Decoder, encode
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.hashing import ROOT, hash_blocks, root_of
from quire.proto.messages import Admit
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Adapter, Generate, Pool, Work, adapter_of, with_adapter

ADAPTER = Adapter("a", "/x", bytes(range(16)))
GENERATE, POOL = Generate(SamplingParams(), 7, [2], b"", [[3]]), Pool(PoolingParams(), "pair", 4)


@pytest.mark.parametrize("work", [GENERATE, POOL])
def test_work_without_an_adapter_has_not_one_byte_more(work: Work) -> None:
    fields = list(msgspec.structs.asdict(work).values())
    assert encode(work) == encode([work.__struct_config__.tag, *fields])
    assert with_adapter(work, None) is work and adapter_of(work) is None


@pytest.mark.parametrize("work", [GENERATE, POOL])
def test_work_with_an_adapter_is_the_same_work(work: Work) -> None:
    adapted = with_adapter(work, ADAPTER)
    assert isinstance(adapted, type(work)) and adapter_of(adapted) == ADAPTER
    assert all(getattr(adapted, name) == getattr(work, name) for name in work.__struct_fields__)
    assert Decoder(Work)(encode(adapted)) == adapted
    there = Decoder(Admit)(encode(Admit(1, 2, 0, b"", 0, with_adapter(adapted, None, 3))))
    assert (there.adapter_slot, adapter_of(there.work)) == (3, None)
    assert Admit(1, 2, 0, b"", 0, work).adapter_slot == -1


def test_the_root_tells_adapters_apart_and_salts_too() -> None:
    roots = [root_of(salt, adapter) for salt in ("", "s") for adapter in (b"", bytes(16), ADAPTER.digest)]
    assert roots[0] == ROOT and len(set(roots)) == 6
    assert len({hash_blocks(bytes(64), 16, root)[0] for root in roots}) == 6


def test_a_digest_is_of_both_files(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "a")
    first = adapter_digest(folder)
    assert adapter_digest(adapter_folder(tmp_path / "b")) == first
    assert adapter_digest(adapter_folder(folder, b"other")) != first != adapter_digest(adapter_folder(folder, r=9))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read: No such file"):
        adapter_digest(folder)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"max_lora_rank": 20}, r"max_lora_rank \(20\) must be one of"),
        ({"max_loras": 0}, r"max_loras \(0\) must be >= 1"),
        ({"max_loras": 4, "max_cpu_loras": 3}, r"max_cpu_loras \(3\) must be >= max_loras \(4\)\."),
        ({"lora_modules": ["a=/x"]}, "add --enable-lora"),
        ({"lora_dtype": "int8"}, "Unknown lora_dtype"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineArgs(**flags).check()
