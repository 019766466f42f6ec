"""The head of a GGUF file: what is refused and how, and that no bytes crash, hang or fill the memory."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import gguf_heads as heads
import pytest
from gguf_heads import ARRAY, TEXT, U32, U64, key, tensor, text, texts

from quire.proto.checkpoint.gguf import MOST_HEAD, gguf_file, read_gguf
from quire.proto.checkpoint.gguf_config import gguf_config
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.config import ConfigError

ONE = [tensor("a.weight", (8,))]
HUGE = 2**63


def written(tmp_path: Path, data: bytes, room: int = 4096) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(data + bytes(-len(data) % 32) + bytes(room))
    return file


def test_what_a_file_says(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for version in (2, 3):
        file.write_bytes(heads.sound().replace(b"GGUF\3", b"GGUF" + bytes([version])))
        found = read_gguf(file)
        assert found.metadata["general.architecture"] == "llama"
        assert found.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ab", "</s>"]
        assert list(found.metadata["tokenizer.ggml.scores"]) == [0, 1, 2, 3]
        assert found.metadata["tokenizer.ggml.add_bos_token"] is True
        table = found.tensors["token_embd.weight"]
        assert (table.shape, table.type.name, table.nbytes, table.start % 32) == ((4, 8), "F32", 128, 0)
        assert found.tensors["output_norm.weight"].start == table.start + 128


def array(kind: int, count: int) -> bytes:
    """A head with one key, an array without its values."""
    return heads.head([key("k", ARRAY, struct.pack("<IQ", kind, count))], [])


BAD = {
    "no gguf": (heads.head([], [], magic=b"GGML"), "does not begin with 'GGUF'"),
    "version 1": (heads.head([], [], version=1), "GGUF version 1 is not read"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
    "too many keys": (heads.head([], [], says_keys=HUGE), f"it says to have {HUGE} keys, more than"),
    "too many tensors": (heads.head([], [], says_tensors=20_001), "it says to have 20001 tensors, more than"),
    "keys that are not there": (heads.head([], [], says_keys=2000), "key '' is there twice"),
    "a long key": (heads.head([struct.pack("<Q", HUGE)], []), f"key 0 of 1 has a text of {HUGE} bytes, more than"),
    "a long text": (heads.head([key("k", TEXT, struct.pack("<Q", 2**40))], []), "key 'k' has a text of 1099511627776"),
    "a text behind the end": (heads.head([key("k", TEXT, struct.pack("<Q", 9000))], []), "key 'k' ends behind the end"),
    "a key twice": (heads.head([key("k", U32, bytes(4))] * 2, []), "key 'k' is there twice"),
    "an unknown type": (heads.head([key("k", 13, b"")], []), "key 'k' has a value of type 13"),
    "a bool of 2": (heads.head([key("k", heads.BOOL, b"\2")], []), "key 'k' must be 0 or 1"),
    "no text": (heads.head([key("k", TEXT, text(b"\xff\xfe"))], []), "key 'k' is not UTF-8"),
    "a bomb of numbers": (array(U64, 2**61), "key 'k' has 2305843009213693952 values"),
    "numbers that are not there": (array(U64, 2**20), "key 'k' ends behind the end"),
    "a bomb of texts": (array(TEXT, 2**20), "key 'k' says to have 1048576 values, more than"),
    "too many texts": (array(TEXT, 2**20 + 1), "key 'k' has 1048577 values, which makes more than 1048576 texts"),
    "too many arrays": (array(ARRAY, 257), "key 'k' has 257 values, which makes more than 256 arrays"),
    "a key of two lines": (heads.head([key("k\nl", U32, bytes(4))], []), r"key 0 of 1 has characters .*: 'k\\nl'"),
    "a tensor of two lines": (heads.head([], [tensor("t\nu", (8,))]), r"tensor 0 of 1 has characters .*: 't\\nu'"),
    "nested arrays": (heads.head([key("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 9)], []), "key 'k' has arrays within"),
    "alignment 3": (heads.head([key("general.alignment", U32, b"\3\0\0\0")], []), "alignment.*power of two.*got 3"),
    "alignment 0": (heads.head([key("general.alignment", U32, bytes(4))], []), "alignment.*power of two.*got 0"),
    "no dims": (heads.head([], [tensor("t", ())]), "tensor 't' has 0 dims"),
    "many dims": (heads.head([], [tensor("t", (1,) * 5)]), "tensor 't' has 5 dims"),
    "a dim of 0": (heads.head([], [tensor("t", (8, 0))]), r"tensor 't' has shape \(0, 8\), which holds nothing"),
    "a tensor twice": (heads.head([], [tensor("t", (8,)), tensor("t", (8,), 0, 32)]), "tensor 't' is there twice"),
    "a type that is none": (heads.head([], [tensor("t", (8,), 99)]), "tensor 't' has type 99"),
    "half a block": (heads.head([], [tensor("t", (40,), 8)]), "tensor 't' has rows of 40 values.*Q8_0.*blocks of 32"),
    "an odd offset": (heads.head([], [tensor("t", (8,), 0, 4)]), "tensor 't' begins at byte 4 .*no multiple of 32"),
    "overlapping": (heads.head([], [tensor("t", (64,)), tensor("u", (8,), 0, 32)]), "tensor 'u' overlaps 't'"),
    "behind the end": (heads.head([], [tensor("t", (8,), 0, 2**40)]), "tensor 't' ends at byte .*: it is cut short"),
    "a product that wraps": (heads.head([], [tensor("t", (2**32, 2**32))]), "tensor 't' ends at byte .* cut short"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_fault_is_one_line_with_the_file_and_the_key_or_tensor(name: str, tmp_path: Path) -> None:
    data, said = BAD[name]
    with pytest.raises(ConfigError, match=said) as raised:
        read_gguf(written(tmp_path, data))
    assert str(tmp_path / "model.gguf") in str(raised.value) and "\n" not in str(raised.value)


def test_every_way_of_being_cut_short_is_refused(tmp_path: Path) -> None:
    whole, file = heads.sound(), tmp_path / "model.gguf"
    file.write_bytes(whole)
    read_gguf(file)
    for size in range(0, len(whole), 5):
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"model\.gguf"):
            read_gguf(file)


def test_no_more_than_the_limit_is_read_of_a_sparse_file(tmp_path: Path) -> None:
    """A file of a gigabyte of holes that says it is all metadata."""
    file = tmp_path / "model.gguf"
    file.write_bytes(heads.head([key("k", TEXT, struct.pack("<Q", 4 << 20))] * 300, []))
    with file.open("r+b") as data:
        data.truncate(1 << 30)
    with pytest.raises(ConfigError, match=r"key|longer than"):
        read_gguf(file)
    strings = [key(f"k{n}", TEXT, text(bytes(4 << 20))) for n in range(MOST_HEAD // (4 << 20) + 1)]
    file.write_bytes(heads.head(strings, ONE) + bytes(4096))
    with pytest.raises(ConfigError, match=rf"key 'k\d+' makes the metadata longer than {MOST_HEAD >> 20} MiB"):
        read_gguf(file)


def test_a_folder_and_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        from quire.proto.checkpoint.model_config import resolve_model

        resolve_model(str(tmp_path / "none.gguf"))
    assert gguf_file(tmp_path) is None
    (tmp_path / "a.gguf").write_bytes(heads.sound())
    (tmp_path / "mmproj-a.gguf").write_bytes(heads.sound())
    assert gguf_file(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(heads.sound())
    with pytest.raises(ConfigError, match=r"holds several models \(a\.gguf, b\.gguf\); name one file"):
        load_model_config(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf_file(tmp_path) is None
    (tmp_path / "c.gguf").mkdir()
    with pytest.raises(ConfigError, match="is no file"):
        read_gguf(tmp_path / "c.gguf")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], r"key 'general.architecture' must be a text, got None"),
        ([key("general.architecture", TEXT, text("a\n" * 10**6))],
         r"^.*general.architecture 'a.* … .*Hugging Face folder\.$"),
        ([key("general.architecture", TEXT, text("rwkv"))], r"general.architecture 'rwkv' is not supported"),
        ([key("general.architecture", TEXT, text("llama"))], r"key 'llama.attention.head_count' must be a positive"),
        ([key("general.architecture", TEXT, text("llama")), texts("tokenizer.ggml.tokens", list("abcdefghi"))],
         r"'tokenizer.ggml.tokens' has 9 tokens, and tensor 'token_embd.weight' rows for 4"),
        ([key("general.architecture", TEXT, text("llama")), key("tokenizer.ggml.tokens", U32, bytes(4))],
         r"key 'tokenizer.ggml.tokens' must be a list of texts, got 0"),
    ],
)  # fmt: skip
def test_keys_of_another_kind_are_named(keys: list[bytes], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        gguf_config(written(tmp_path, heads.head(keys, [tensor("token_embd.weight", (8, 4))])))


def test_serving_a_bad_file_ends_with_one_line_and_a_code(tmp_path: Path) -> None:
    file = written(tmp_path, BAD["overlapping"][0])
    command = [sys.executable, "-m", "quire.cli", "serve", str(file)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode not in (0, None)
    lines = [line for line in found.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and "tensor 'u' overlaps 't'" in lines[0] and str(file) in lines[0]


def test_changed_heads_are_read_or_refused(tmp_path: Path) -> None:
    """`python bench/fuzz.py --only gguf` does it with more."""
    found = heads.fuzz(1000, 14, tmp_path)
    assert 250 < found["readings refused, of three each"] < 3000  # some are read
