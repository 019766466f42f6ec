"""A feature that nobody asks for adds no byte: how long messages are without any of them.

The lengths are those of before adapters, speculation and tiers. A change of one is a change of the protocol, which
costs all requests; what is appended to a message belongs into a struct that is sent where it is asked for alone.
"""

from __future__ import annotations

from array import array
from typing import Any

from scheduler_rig import Rig

from quire.proto.codec import encode, i8, i32, i64
from quire.proto.messages import Accepted, Submit, TextBatch, TokenBatch, Tokenize
from quire.proto.params import SamplingParams
from quire.proto.work import Generate

LENGTHS = {
    "Tokenize": 106,
    "Accepted": 150,
    "Submit": 213,
    "plan of a prompt": 440,
    "plan of decodes": 90,
    "StepResult": 31,
    "TokenBatch": 101,
    "TextBatch": 108,
}


def sent() -> dict[str, Any]:
    """One of each message of a step, of two requests of 20 tokens each."""
    rig = Rig()
    prompts, submit, submitted = [list(range(20)), list(range(30, 50))], rig.core.submit, []
    rig.core.submit = lambda owner, message: (submitted.append(message), submit(owner, message))  # type: ignore
    for prompt in prompts:
        rig.submit(prompt, max_tokens=9)
    first, second = rig.plan(), rig.plan()
    result = rig.stores[0].run(first)
    rig.core.commit(rig.replica, result)
    rig.core.commit(rig.replica, rig.stores[0].run(second))
    decodes = rig.plan()
    rig.core.outbox.take()
    rig.core.commit(rig.replica, rig.stores[0].run(decodes))
    ((_, tokens),) = rig.core.outbox.take()
    work = Generate(SamplingParams(max_tokens=9), 1)
    (submit_message, _), two = submitted, array("i", [1, 2])
    assert isinstance(submit_message, Submit) and isinstance(tokens, TokenBatch)
    return {
        "Tokenize": Tokenize(1, 0, work, 1.0, prompt="Once upon a time"),
        "Accepted": Accepted(1, 0, i32(prompts[0]), None, work),
        "Submit": submit_message,
        "plan of a prompt": first,
        "plan of decodes": decodes,
        "StepResult": result,
        "TokenBatch": tokens,
        "TextBatch": TextBatch(i64([1, 2]), i32([0, 0]), i32([0, 0]), i32(two), i32([1, 1]), i32(two), ["a", "b"],
                               i8([0, 0]), [None, None], i32([-1, -1])),
    }  # fmt: skip


def test_messages_without_what_nobody_asks_for_are_as_long_as_they_were() -> None:
    assert {name: len(encode(message)) for name, message in sent().items()} == LENGTHS


if __name__ == "__main__":  # with the package of another commit: what they were there
    print({name: len(encode(message)) for name, message in sent().items()})
