"""An Engine with nothing behind it: real streams fed from a script, for tests and for measuring the HTTP end alone.

``FakeServer`` is the whole HTTP end over it, on a port of its own, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ..client.core import SCHEDULER, Connect
from ..client.engine import Engine
from ..client.generation import OpenGeneration
from ..client.pooled import OpenPooling, OpenText
from ..client.request import OpenRequest
from ..client.results import RequestError, TokenLogprobs
from ..proto.codec import from_i32, i32
from ..proto.event_loop import new_loop
from ..proto.listening import listen, listen_unix
from ..proto.messages import Accepted, AdapterEntry, Finish, Peer, Peers, ReplicaStats, Stats, StepView, Tokenize, View
from ..proto.work import Adapter, Text, Work
from .app import make_app
from .front import FRONT, Settings
from .main import app_runner, meet
from .port import url_of
from .prompts import text_of

if TYPE_CHECKING:
    import numpy

MAX_MODEL_LEN = 2048


@dataclass(slots=True)
class Say:
    """One step of one child: text and how many tokens it took, or its end."""

    index: int
    text: str
    tokens: int = 1
    finish: Finish = Finish.NONE
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # made up where they are asked for and not given


Script = Callable[[OpenGeneration], Iterator[Say | RequestError | float]]
"""What happens to an accepted request: things said, an error that ends it, or seconds of silence."""


PoolScript = Callable[[OpenPooling], Iterator[Any]]
"""The same for one that is pooled: the array it is answered with, an error, or seconds of silence."""


def count_words(request: OpenGeneration) -> Iterator[Say | RequestError | float]:
    """Children take turns to say " <child>.<step>" until max_tokens."""
    params = request.work.params
    limit = params.max_tokens or 5
    for step in range(limit):
        for index in range(params.n):
            finish = Finish.LENGTH if step == limit - 1 else Finish.NONE
            yield Say(index, f" {index}.{step}", finish=finish)
        yield 0.0


def compare_words(request: OpenPooling) -> Iterator[numpy.ndarray | RequestError | float]:
    """An embedding is of three numbers that tell texts apart; a score is the share of the first text's words that are
    in the second; of two classes the second is the longer a text the likelier."""
    import numpy

    params, words = request.work.params, _words(request)
    rows = numpy.array([[len(word), ord(word[0]) / 100, 1] for word in words or ["?"]], numpy.float32)
    second = (request.work.pair or "").split()
    if params.task == "score":
        first = words[: len(words) - len(second)]
        yield numpy.array([len(set(first) & set(second)) / len(first)], numpy.float32)
    elif params.task == "classify":
        yield numpy.array([1, len(words)], numpy.float32) / numpy.float32(1 + len(words))
    elif params.task == "token_embed":
        yield rows
    else:
        yield rows.sum(0)[: params.dimensions]


class FakeEngine(Engine):
    """``script`` plays each request, ``pooling`` each that is pooled; ``refuse`` may answer one with an error before it
    is accepted."""

    def __init__(self, script: Script = count_words) -> None:
        super().__init__("ipc:///nowhere")
        self.script = script
        self.pooling: PoolScript = compare_words
        self.refuse: Callable[[OpenRequest], RequestError | None] = lambda request: None
        self.is_ready = True
        self.requests: list[OpenRequest] = []
        self.words: dict[str, int] = {}
        self.aborted: list[int] = []
        self.viewed = 0  # how often ``view`` was asked for
        self._players: set[asyncio.Task[None]] = set()
        self._generation = 0

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        peers = [Peer("detokenizer", "fake", "nowhere")]
        self.core.received(SCHEDULER, Peers(1, peers, block_size=16, ready=True, max_model_len=MAX_MODEL_LEN))
        self._flush()

    async def close(self) -> None:
        self.fail_all(RequestError(503, "the engine has been closed."))
        for player in self._players:
            player.cancel()

    @property
    def ready(self) -> bool:
        return self.is_ready

    async def register(self, adapter: Adapter, parent: str = "", replace: bool = False, timeout: float = 300.0) -> None:
        if "bad" in adapter.name:
            raise RequestError(400, f"{adapter.path}/adapter_model.safetensors: tensor x is of another shape.")
        self.adapters.merge([AdapterEntry(adapter.name, self._next_generation(), adapter, parent)])

    async def unregister(self, name: str, timeout: float = 10.0) -> None:
        if self.adapters.get(name) is None:
            raise RequestError(404, f"The lora adapter '{name}' cannot be found.")
        self.adapters.merge([AdapterEntry(name, self._next_generation(), None)])

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    async def stats(self, timeout: float = 2.0) -> Stats:
        if not self.is_ready:
            raise TimeoutError
        return Stats(
            token=0, running=self.open_requests, waiting=0, blocks=100, blocks_used=7, preemptions=3,
            prefix_queries=50, prefix_hits=20, prompt_tokens=11, generation_tokens=13, steps=17, bad_frames=2,
            replicas=[ReplicaStats(0, "ready", "cpu", 0, 100, 7, 17)],
        )  # fmt: skip

    async def view(self, since: int = 0, timeout: float = 2.0) -> View:
        self.viewed += 1
        stats = await self.stats()
        return View(0, 5.0, stats, [], [], [], [], [StepView(since + 1, "step", 0, 4.5, 0.01, 3, 2)])

    def _flush(self) -> None:
        while todo := self.core.take():
            for peer, what in todo:
                if isinstance(what, Connect):
                    self.core.connected(peer)
                elif isinstance(what, Tokenize):
                    self._begin(self.core.open[what.uid])

    def _begin(self, request: OpenRequest) -> None:
        self.requests.append(request)
        player = asyncio.get_running_loop().create_task(self._play(request))
        self._players.add(player)
        player.add_done_callback(self._players.discard)

    def _abort(self, uid: int) -> None:
        if uid in self.core.open:
            self.aborted.append(uid)
        super()._abort(uid)

    async def _play(self, request: OpenRequest) -> None:
        await asyncio.sleep(0)
        if (error := self.refuse(request)) is not None:
            self.core.finish(request, error)
            return
        if isinstance(request, OpenText):
            request.accept(Accepted(request.uid, 0, *self.spell(request.message)))
            self.core.finish(request, None)
            return
        message = request.message
        ids = from_i32(message.ids) if message.ids is not None else list(range(len(_words(request))))
        request.accept(Accepted(uid=request.uid, attempt=0, ids=i32(ids), prompt=message.prompt, work=message.work))
        if isinstance(request, OpenPooling):
            await self._play_pooling(request)
        elif isinstance(request, OpenGeneration):
            await self._play_generation(request, ids)

    def spell(self, message: Tokenize) -> tuple[bytes, str | None, Work | Text]:
        """A vocabulary of words, in which each has an id from the time when it is first said; a model that can fill in
        marks what it is told with ids from 9001 on."""
        work, text = message.work, message.prompt
        if not isinstance(work, Text):
            raise TypeError(f"{type(work).__name__} is no Text")

        def ids_of(said: str) -> list[int]:
            return [self.words.setdefault(word, len(self.words)) for word in said.split()]

        if message.ids is not None:
            ids, known = from_i32(message.ids), list(self.words)
            text = " ".join(known[token] for token in ids)
        elif (infill := work.infill) is not None:
            files = [token for _, told in infill.extra for token in (9004, *ids_of(told))]
            ids = [*files, 9001, *ids_of(infill.prefix), 9002, *ids_of(infill.suffix), 9003, *ids_of(infill.after)]
        elif work.parts is not None:
            ids = [id for part in work.parts for id in ([part] if isinstance(part, int) else ids_of(part))]
        else:
            text = " ".join(text_of(one) for one in message.messages) if message.messages is not None else text or ""
            ids = ids_of(text)
        names = {token: word for word, token in self.words.items()}
        told = [names.get(token, "") for token in ids] if work.pieces else []
        texts = [word.encode() for word in told]
        return i32(ids), text, Text(names=[*told], texts=texts, ends=[9005] if work.infill is not None else [])

    async def _play_generation(self, request: OpenGeneration, ids: list[int]) -> None:
        message, params = request.message, request.work.params
        if (k := params.prompt_logprobs) is not None and len(ids) > 1:
            texts = [" " + word for word in _words(request)] if message.ids is None else [f" {i}" for i in ids]
            request.take_prompt(1, [likely(i, text, k, 0) for i, text in zip(ids[1:], texts[1:], strict=True)])
        request.start(self.core.clock(), 0)
        for said in self.script(request):
            if request.done:
                return
            if isinstance(said, float):
                await asyncio.sleep(said)
            elif isinstance(said, RequestError):
                self.core.finish(request, said)
            else:
                have = len(request.children[said.index].tokens)
                tokens = list(range(have, have + said.tokens))
                end = len(tokens) + have if said.finish else -1
                found = said.logprobs
                if (k := params.logprobs) is not None and not found:
                    texts = [said.text, *[""] * (said.tokens - 1)]
                    found = [likely(i, text, k, said.index) for i, text in zip(tokens, texts, strict=False)]
                now = self.core.clock()
                if not request.take(
                    said.index, have, tokens, said.text, said.finish, said.stop_reason, end, now, found
                ):
                    self.core.finish(request, RequestError(500, f"the script makes no sense: {said}"))
        if request.done:
            self.core.finish(request, request.error)

    async def _play_pooling(self, request: OpenPooling) -> None:
        for said in self.pooling(request):
            if isinstance(said, float):
                await asyncio.sleep(said)
            elif isinstance(said, RequestError):
                self.core.finish(request, said)
            elif not request.done:
                request.take(len(said) if said.ndim > 1 else 0, said.tobytes())
                self.core.finish(request, None)


def likely(token: int, text: str, k: int, index: int) -> TokenLogprobs:
    """Logprobs of a token of child ``index``: second among its like, and the likelier the later the child."""
    own = -1.0 / (index + 2)
    others = [-0.25 / (index + 2), own, *(own - place for place in range(1, k))][:k]
    ids = [token, *[token + 1000, token, *(token + 1000 + place for place in range(1, k))][:k]]
    texts = [text, *["?", text, *(f"?{place}" for place in range(1, k))][:k]]
    return TokenLogprobs(ids, [own, *others], 2, texts, {})


def _words(request: OpenRequest) -> list[str]:
    message = request.message
    if message.prompt is not None:
        pair = request.work.pair or "" if isinstance(request, OpenPooling) else ""
        return message.prompt.split() + pair.split()
    return [word for one in message.messages or [] for word in text_of(one).split()]


class FakeServer:
    """A running frontend over a FakeEngine; use as a context manager. ``url`` is where it listens."""

    def __init__(
        self, script: Script = count_words, tls: ssl.SSLContext | None = None, uds: str | None = None,
        folder: str | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        self._tls, self._uds, self._folder = tls, uds, folder
        self.engine: FakeEngine
        self.url = ""
        self._script = script
        self._settings = Settings(**{"names": ["fake"], **settings})
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-server")

    def __enter__(self) -> FakeServer:
        self._thread.start()
        self._up.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(self._serve())
        finally:
            self._up.set()  # nobody waits for a server that cannot start

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.engine = FakeEngine(self._script)
        self.engine.adapters.merge(self._settings.modules)
        await self.engine.start()
        sock = listen_unix(self._uds) if self._uds else listen("127.0.0.1", 0)
        self.app = make_app(self.engine, self._settings)
        self.runner = runner = app_runner(self.app)
        await runner.setup()
        self.site = web.SockSite(runner, sock, ssl_context=self._tls)
        self.app[FRONT].peers = peers = await meet(self.app, self._folder)
        await self.site.start()
        self.url = url_of(sock, "http" if self._tls is None else "https")
        self._up.set()
        await self._stop.wait()
        await self.engine.close()
        await runner.cleanup()
        if peers is not None:
            await peers.close()
