"""``prompt_embeds``: what is taken for a prompt of embeddings, what is refused, and where it goes."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from http_asks import error_of, post
from safetensors.torch import save

from quire.client.generation import OpenGeneration
from quire.frontend.embeds import embeds_of_body
from quire.frontend.errors import ApiError
from quire.frontend.fake import FakeServer
from quire.proto import messages as m
from quire.proto.codec import from_i32
from quire.proto.hashing import root_of
from quire.proto.params import SamplingParams
from quire.proto.work import AdaptedGenerate, Adapter, Embeds, Generate, since, with_adapter, with_embeds

SIZE = 4


def file_of(tensor: torch.Tensor, name: str = "prompt_embeds", **more: torch.Tensor) -> str:
    return base64.b64encode(save({name: tensor, **more})).decode()


def made(header: Any, data: bytes = b"") -> str:
    """A file with this header, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return base64.b64encode(len(text).to_bytes(8, "little") + text + data).decode()


VECTORS = torch.arange(12, dtype=torch.float32).reshape(3, SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_file_of_one_tensor(dtype: torch.dtype) -> None:
    (found,) = embeds_of_body(file_of(VECTORS.to(dtype), "any"), SIZE)
    assert (found.dtype, found.size, found.count, found.first) == (str(dtype).removeprefix("torch."), SIZE, 3, 0)
    again = torch.frombuffer(bytearray(found.data), dtype=dtype).reshape(3, SIZE)
    assert torch.equal(again, VECTORS.to(dtype)) and len(found.digest) == 16
    (batched,) = embeds_of_body([file_of(VECTORS.to(dtype)[None])], SIZE)
    assert batched == found


def test_what_differs_has_another_digest() -> None:
    kinds = [VECTORS, VECTORS + 1, VECTORS[:2], VECTORS.half(), VECTORS.bfloat16()]
    found = embeds_of_body([file_of(each) for each in kinds], SIZE)
    assert len({each.digest for each in found}) == len(kinds)
    roots = {root_of("", b"", each.digest) for each in found} | {root_of(""), root_of("", found[0].digest)}
    assert len(roots) == len(kinds) + 2


ENTRY = {"dtype": "F32", "shape": [1, SIZE], "data_offsets": [0, 16]}


def saved_by_torch(legacy: bool) -> str:
    file = io.BytesIO()
    torch.save(VECTORS, file, _use_new_zipfile_serialization=not legacy)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (5, "must be a base64 string"),
        ([], "must hold 1 to"),
        ("!!", "not valid base64"),
        ("é", "not valid base64"),
        ("", "no safetensors file"),
        ("AAAA", "no safetensors file"),
        (saved_by_torch(False), "which is a pickle and is not opened"),
        (saved_by_torch(True), "which is a pickle and is not opened"),
        (base64.b64encode((2**63).to_bytes(8, "little") + b"{}").decode(), "no safetensors file"),
        (made(json.dumps({"x": ENTRY}).encode().ljust(65537), bytes(16)), "no safetensors file"),
        (made(b"[1]"), "header cannot be read"),
        (made(b"{bad"), "header cannot be read"),
        (made(b"[" * 5000), "header cannot be read"),
        (made({"x": {"dtype": "F32"}}), "header cannot be read"),
        (made({}), "holds 0 tensors"),
        (file_of(VECTORS, y=VECTORS + 1), "holds 2 tensors"),
        (file_of(VECTORS.double()), "type 'F64'"),
        (made({"x": ENTRY}, bytes(15)), "has 15 bytes of numbers"),
        (made({"x": {**ENTRY, "data_offsets": [4, 20]}}, bytes(20)), "has 20 bytes of numbers"),
        (made({"x": {**ENTRY, "shape": [-1, -SIZE]}}, bytes(16)), "header cannot be read"),
        (made({"x": {**ENTRY, "shape": [10**18] * 300}}, bytes(16)), "header cannot be read"),
        (made({"x": {**ENTRY, "shape": [10**4000, 10**4000]}}, bytes(16)), "header cannot be read"),
        (made({"x": {**ENTRY, "shape": [2**62, SIZE]}}, bytes(16)), "has 16 bytes"),
        (file_of(VECTORS[0]), "must be [tokens, 4]"),
        (file_of(VECTORS[:, :3].contiguous()), "must be [tokens, 4]"),
        (file_of(VECTORS[:0]), "must be [tokens, 4]"),
        (file_of(torch.full((2, SIZE), float("nan"))), "not finite, the first at 0"),
        (file_of(torch.tensor([[1, 2, 3, float("-inf")]]).half()), "not finite, the first at 3"),
        (file_of(torch.full((1, SIZE), float("inf")).bfloat16()), "not finite"),
    ],
)
def test_what_is_no_such_file_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        embeds_of_body(given, SIZE)
    assert (
        words in refused.value.message
        and len(refused.value.message) < 250
        and (refused.value.status, refused.value.param) == (400, "prompt_embeds")
    )


# ---------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with FakeServer(embed_size=SIZE) as running:
        yield running


@pytest.fixture
def server(shared: FakeServer) -> FakeServer:
    shared.engine.requests.clear()
    return shared


def test_embeddings_come_before_texts(server: FakeServer) -> None:
    body = {"prompt_embeds": [file_of(VECTORS), file_of(VECTORS[:1])], "prompt": "hi", "max_tokens": 1, "logprobs": 1}
    status, answer = post(server, body)
    assert status == 200 and answer["usage"]["prompt_tokens"] == 5 and len(answer["choices"]) == 3
    first, second, third = (r for r in server.engine.requests if isinstance(r, OpenGeneration))
    assert from_i32(first.message.ids or b"") == [0, 0, 0] and third.message.prompt == "hi"
    assert [first.work.embeds.count, second.work.embeds.count] == [3, 1] and type(third.work) is Generate
    assert post(server, {"prompt_embeds": file_of(VECTORS), "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"n": 2, "temperature": 1}, "n"),
        ({"best_of": 2, "temperature": 1}, "best_of"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"prompt": []}, "prompt"),
    ],
)
def test_what_means_nothing_beside_them(server: FakeServer, more: Any, param: str) -> None:
    assert error_of(post(server, {"prompt_embeds": file_of(VECTORS), **more}), 400)["param"] == param
    assert not server.engine.requests


def test_they_are_off_where_the_operator_has_not_turned_them_on() -> None:
    with FakeServer() as server:
        error = error_of(post(server, {"prompt_embeds": file_of(VECTORS)}), 400)
        assert "--enable-prompt-embeds" in error["message"] and error["param"] == "prompt_embeds"


# ---------------------------------------------------------------- on their way

(EMBEDS,) = embeds_of_body(file_of(VECTORS), SIZE)
WORK = Generate(SamplingParams(max_tokens=4), 7)


def test_a_worker_is_sent_only_what_is_to_be_computed() -> None:
    work = with_embeds(WORK, EMBEDS)
    assert since(work, 0) is work and since(WORK, 2) is WORK
    left = since(work, 2)
    assert left.embeds == Embeds("float32", SIZE, 3, EMBEDS.digest, EMBEDS.data[32:], 2)
    assert since(left, 3).embeds.data == since(work, 9).embeds.data == b""
    adapter = Adapter("a", "/a", b"d")
    adapted = with_adapter(work, adapter, 3)
    assert (adapted.embeds, adapted.slot) == (EMBEDS, 3)
    assert with_embeds(AdaptedGenerate(SamplingParams(), 7, adapter=adapter), EMBEDS).adapter == adapter


def test_a_request_that_is_sent_again_has_them_again(server: FakeServer) -> None:
    work = with_embeds(WORK, EMBEDS)
    request = OpenGeneration(m.Tokenize(1, 0, work, 0.0, ids=bytes(12)), work, WORK.params, 1.0)
    request.accept(m.Accepted(1, 0, bytes(12), None, with_embeds(work, None)))
    assert request.again().work.embeds == EMBEDS
