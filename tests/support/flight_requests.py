"""Requests that hold tokens, text and an API key wherever they can."""

from __future__ import annotations

from collections.abc import Callable

from quire.proto.codec import i32
from quire.proto.hashing import hash_blocks
from quire.proto.messages import Child, Submit
from quire.proto.params import SamplingParams
from quire.proto.structured import StructuredOutputsParams
from quire.proto.work import Generate


def submits(prompts: list[list[int]], stops: list[int], token: Callable[[], int], secrets: list[str]) -> list[Submit]:
    """One with everything, a resumed one without hashes, three children, and a beam search."""
    key, stop, word, schema = secrets
    full = SamplingParams(
        max_tokens=50, stop=[stop], stop_token_ids=stops[:2], bad_words=[word], logit_bias={token(): 1.0},
        allowed_token_ids=[token(), token()], structured_outputs=StructuredOutputsParams(regex=schema), min_tokens=1,
    )  # fmt: skip
    beams = SamplingParams(use_beam_search=True, temperature=0.0, n=2, max_tokens=30, stop_token_ids=stops[2:])
    plain = SamplingParams(max_tokens=40, stop_token_ids=[stops[0]])
    suppressed, banned = i32([token()]), [[token(), token()]]
    made = [
        _submit(1, prompts[0], full, key=key, work=Generate(full, 1, [2**29 + 1], suppressed, banned)),
        _submit(2, prompts[1], plain, children=[Child(0, i32([token() for _ in range(5)]))], hashes=b""),
        _submit(3, prompts[2], SamplingParams(max_tokens=40, n=3), key=key),
        _submit(4, prompts[3], beams, key=key),
    ]
    for message in made:
        message.priority = 0
    return made


def _submit(uid: int, prompt: list[int], params: SamplingParams, **more: object) -> Submit:
    ids = i32(prompt)
    fields = {"hashes": b"".join(hash_blocks(ids, 8)), "work": Generate(params, uid, [2**29 + 1]), **more}
    return Submit(uid=uid, attempt=0, ids=ids, arrival=float(uid), **fields)
