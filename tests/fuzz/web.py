"""Every HTTP route: bytes that are no HTTP, bodies that are no JSON, and requests with one thing changed.

Whatever comes, the answer is a status the API knows (never a 500), an error has OpenAI's shape, and sound requests are
served right in between.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from typing import Any

from chaos.cluster import Cluster
from hypothesis import strategies as st

from fuzz.frames import Frames, hypotheses
from fuzz.sockets import BATCH, Result, Watch
from fuzz.targets import Valid
from quire.proto import messages as m

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens",
          "/v1/responses", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/responses/resp_1/input_items",
          "/v1/responses/input_tokens", "/tokenize", "/detokenize", "/apply-template", "/tokenizer_info",
          "/completion", "/infill", "/props", "/slots", "/inference/v1/generate",
          "/v1/completions/render", "/v1/chat/completions/render",
          "/v1/requests/x/cancel",
          "/api/generate", "/api/chat", "/api/embed", "/api/tags", "/api/show", "/api/ps", "/api/pull",
          "/generate", "/generate_stream", "/info", "/invocations",
          "/v1/models", "/v1/models/quire-demo",
          "/v1/files", "/v1/files/file-00000000", "/v1/files/file-00000000/content",
          "/v1/batches", "/v1/batches/batch_00000000", "/v1/batches/b/cancel", "/health", "/health/live",
          "/health/ready", "/health/generate", "/ping", "/version", "/load", "/metrics", "/sleep", "/wake_up",
          "/is_sleeping", "/start_profile", "/stop_profile", "/reset_prefix_cache", "/", "/nothing", "/v1/models/%ff",
          "/v1/models/a%2f..%2fb", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # fmt: skip
METHODS = ("POST", "POST", "POST", "GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "NONSENSE")
KNOWN = {200, 400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 417, 422, 429, 431, 501, 503, 505}
AT_ONCE = 16
PATIENCE_S = {True: 3.0, False: 0.3}
"""The client's, by whether it sent sound HTTP: some of that takes long, and of the rest some is waited for."""
READ = 65536

SOUND: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 3, "temperature": 0.5, "n": 1, "stop": ["x"], "seed": 1}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 2, "echo": True, "logit_bias": {"5": 1.0}}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stream": True,
                         "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 3, "use_beam_search": True, "n": 2, "temperature": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "top_logprobs": 2,
                              "logprobs": True, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "Hi"}],
                              "max_tokens": 3, "response_format": {"type": "json_object"}, "priority": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True,
                              "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                              "tool_choice": "required", "parallel_tool_calls": False}),
    ("/v1/responses", {"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 3, "stream": True,
                       "tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": "required"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 3,
                      "system": "x", "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}),
    ("/api/generate", {"model": "quire-demo:latest", "prompt": "Hi", "system": "x", "format": "json", "raw": False,
                       "options": {"num_predict": 3, "seed": 1, "stop": ["x"], "repeat_last_n": 5}, "think": False}),
    ("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 3, "details": True, "do_sample": True, "best_of": 2,
                                                  "grammar": {"type": "regex", "value": "a+"}, "top_n_tokens": 2}}),
    ("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 3, "stop": ["x"], "seed": 1}}),
    ("/", {"inputs": "Hi", "parameters": {"max_new_tokens": 3, "decoder_input_details": True}, "stream": False}),
    ("/invocations", {"prompt": "Hi", "max_tokens": 3}),
    ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": {}}}]}, {"role": "tool", "tool_name": "f", "content": "x"}],
        "options": {"num_predict": 3}, "stream": False, "tools": [{"type": "function", "function": {"name": "f"}}]}),
]  # fmt: skip


def values() -> st.SearchStrategy[Any]:
    """Anything that JSON holds."""
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=12), inner, max_size=5),
        max_leaves=15,
    )


class Requests:
    """An endless supply of requests, as the bytes of a connection."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self._change = Frames(m.ToDetokenizer, rng).change

    def take(self, count: int) -> list[tuple[bytes, bool]]:
        """``count`` of them; True for those that are well-formed HTTP and so must be answered."""
        made = hypotheses(values(), max(1, count // 5), self.rng.randrange(2**31))
        return [self._one(made) for _ in range(count)]

    def _one(self, made: list[Any]) -> tuple[bytes, bool]:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.1:
            return rng.randbytes(rng.choice((1, 10, 300, 5000))), False
        if kind < 0.2:
            data = self._http(*self._changed())
            return self._damaged(data), False
        if kind < 0.35:
            return self._http(rng.choice(METHODS), rng.choice(ROUTES), self._json(rng.choice(made))), True
        if kind < 0.5:
            path, body = rng.choice(SOUND)
            extra = {rng.choice(list(body) + ["suffix", "tools", "user"]): rng.choice(made)}
            return self._http("POST", path, self._json({**body, **extra})), True
        return self._http(*self._changed()), True

    def _changed(self) -> tuple[str, str, bytes]:
        path, body = self.rng.choice(SOUND)
        for _ in range(self.rng.choice((1, 1, 1, 2, 4))):
            body = self._change(body)
        return "POST", path, self._json(body)

    def _json(self, value: Any) -> bytes:
        try:
            return json.dumps(value, default=repr, ensure_ascii=self.rng.random() < 0.5).encode(
                "utf-8", "surrogatepass"
            )
        except (ValueError, TypeError):
            return b"{"

    def _http(self, method: str, path: str, body: bytes) -> bytes:
        rng = self.rng
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines.append(
            "Content-Type: " + ("application/json" if rng.random() < 0.95 else rng.choice(("text/html", "", "a/b;;")))
        )
        if rng.random() < 0.05:
            lines.append(rng.choice(("X-Request-Id: \x01\x02", "Authorization: Bearer x", "X-A: " + "b" * 3000,
                                     "Content-Encoding: gzip", "Expect: 100-continue")))  # fmt: skip
        if rng.random() < 0.1:
            head = "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode()
            return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else head + b"0\r\n\r\n"
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body

    def _damaged(self, data: bytes) -> bytes:
        at, way = self.rng.randrange(len(data)), self.rng.random()
        if way < 0.3:
            return data[:at]
        if way < 0.6:
            return data[:at] + self.rng.randbytes(self.rng.randrange(1, 9)) + data[at:]
        if way < 0.8:
            lengths = (b"Content-Length: -", b"Content-Length: 9", b"Content-Length: 3\r\nContent-Length: ")
            return data.replace(b"Content-Length: ", self.rng.choice(lengths))
        return data.replace(b"\r\n", b"\n")


async def routes(cluster: Cluster, valid: Valid, count: int, rng: random.Random) -> tuple[Result, Counter[int]]:
    """All of it; also how often each status came (0: none)."""
    supply, watch, result, statuses = Requests(rng), Watch(cluster), Result(), Counter[int]()
    room, served = asyncio.Semaphore(AT_ONCE), valid.served

    async def one(data: bytes, sound: bool) -> None:
        async with room:
            status, answer = await exchange(cluster.port, data, PATIENCE_S[sound])
        statuses[status] += 1
        if status not in KNOWN and (status or sound) and not (status == 0 and answer == b"slow"):
            raise AssertionError(f"{status or 'no answer'} to {data[:2000]!r}: {answer[:500]!r}")
        if status >= 400 and sound and b" HTTP/1.1" in data and not data.startswith(b"HEAD"):
            body = answer.partition(b"\r\n\r\n")[2]
            error = json.loads(body)["error"]
            told = {"message": error} if isinstance(error, str) else error  # Ollama's shape, and TGI's
            if told.get("code", status) != status or not told["message"]:
                raise AssertionError(f"{status} with {error}")

    while result.sent < count:
        await asyncio.gather(*(one(*each) for each in supply.take(min(BATCH, count - result.sent))))
        result.sent += BATCH
        await valid.check()
        result.grown = watch.look()
    result.sent, result.served = min(result.sent, count), valid.served - served
    return result, statuses


async def exchange(port: int, data: bytes, patience: float) -> tuple[int, bytes]:
    """Send bytes, read what comes back: its status (0 for none) and the answer; b"slow" where it did not come in time
    or not whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer, late = b"", False
    try:
        writer.write(data)
        async with asyncio.timeout(patience):
            while len(answer) < 16 * READ and (piece := await reader.read(READ)):
                answer += piece
                if b"text/event-stream" in answer:
                    break
    except TimeoutError:
        late = True
    except OSError:
        pass
    finally:
        writer.transport.abort()
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    if late and len(body) < (int(length[1]) if length else 1):
        return 0, b"slow"
    try:
        return (int(answer[9:12]) if answer.startswith(b"HTTP/1.") else 0), answer
    except ValueError:
        return 0, answer
