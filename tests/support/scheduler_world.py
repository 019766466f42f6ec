"""A world of chance for the scheduler's tests: clients that keep what they received the way Engine does, and fake
workers with page stores. Chance decides who arrives, leaves, dies and comes back, and when results return; whatever
happens, every stream must be the oracle's.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from quire.proto.codec import Decoder, encode, from_i8, from_i32, from_i64, i32
from quire.proto.config import EngineArgs
from quire.proto.hashing import hash_blocks
from quire.proto.messages import (
    BeamStopped,
    BeamTokens,
    Child,
    Failed,
    Finish,
    FromSchedulerWorkers,
    Heartbeat,
    Lease,
    Logprobs,
    Managed,
    PromptLogprobs,
    Stopped,
    Submit,
    TokenBatch,
)  # fmt: skip
from quire.proto.params import SamplingParams
from quire.proto.work import Generate
from quire.scheduler.core import Scheduler
from quire.scheduler.fake.fake_model import expected_beams, expected_logprobs, expected_tokens, join
from quire.scheduler.fake.page_store import PageStore
from quire.scheduler.logprobs import first_logprobs, skip_logprobs
from quire.scheduler.replica import Replica

VOCAB = 40
EOS = 0
decode_plan = Decoder(FromSchedulerWorkers)


class Client:
    """One request as Engine sees it: the authoritative tokens of each child."""

    def __init__(self, uid: int, prompt: list[int], params: SamplingParams, seed: int, arrival: float, eos: list[int]):
        self.uid, self.prompt, self.params, self.seed, self.eos = uid, prompt, params, seed, eos
        self.arrival, self.attempt = arrival, 1
        self.tokens: list[list[int]] = [[] for _ in range(params.n)]
        self.finishes: list[Finish] = [Finish.NONE] * params.n
        self.logprobs: list[list[Logprobs]] = [[] for _ in range(params.n)]
        self.prompt_logprobs: list[Logprobs] = []
        self.gone = self.cursed = False
        self.starts = 0

    def live(self) -> list[int]:
        return [i for i, finish in enumerate(self.finishes) if finish is Finish.NONE]

    def submit(self, block_size: int, resume: bool) -> Submit:
        ids = i32(self.prompt)
        children = [Child(i, i32(self.tokens[i])) for i in self.live()] if resume else []
        self.candidates: list[list[int]] = []  # of a beam search with stop strings: output tokens of each
        return Submit(
            self.uid, self.attempt, ids, b"".join(hash_blocks(ids, block_size)),
            Generate(self.params, self.seed, self.eos), self.arrival, children, prompt_logprobs_from=self.prompt_have(),
        )  # fmt: skip

    def prompt_have(self) -> int:
        return sum(len(record.ranks) // 4 for record in self.prompt_logprobs) + 1 if self.prompt_logprobs else 0

    def check_logprobs(self) -> None:
        """Every token's, and every prompt token's before the first of these."""
        params = self.params
        for tokens, records in zip(self.tokens, self.logprobs, strict=True):
            assert sum(len(r.ranks) // 4 for r in records) == (0 if params.logprobs is None else len(tokens))
            if records:
                known = self.prompt + tokens
                assert join(records) == expected_logprobs(known, len(self.prompt), params.logprobs, VOCAB)
        if params.prompt_logprobs is not None and any(self.tokens) and len(self.prompt) > 1:
            expected = expected_logprobs(self.prompt, 1, params.prompt_logprobs, VOCAB)
            assert join(self.prompt_logprobs) == expected

    def check(self, max_model_len: int) -> None:
        """Every stream is the oracle's, cut where the rules say."""
        self.check_logprobs()
        if self.params.use_beam_search:
            self.check_beams(max_model_len)
            return
        for index, tokens in enumerate(self.tokens):
            room = min(self.params.max_tokens, max_model_len - len(self.prompt))
            expected = expected_tokens(self.prompt, (self.seed + index) % 2**64, room, VOCAB)
            stops = {*self.eos, *self.params.stop_token_ids}
            ends = [i + 1 for i, token in enumerate(expected) if token in stops]
            finish = Finish.STOP if ends else Finish.LENGTH
            expected = expected[: ends[0]] if ends else expected
            if self.finishes[index] is Finish.ABORT or self.gone:
                assert tokens == expected[: len(tokens)], (self.uid, index)
            else:
                assert (tokens, self.finishes[index]) == (expected, finish), (self.uid, index)

    def check_beams(self, max_model_len: int) -> None:
        """All of a search's outputs, or none of them."""
        room = min(self.params.max_tokens, max_model_len - len(self.prompt))
        ends = stop_string if self.params.stop else lambda outputs: False
        expected = expected_beams(self.prompt, self.params, self.eos, room, max_model_len, VOCAB, ends)
        if not self.gone or any(self.finishes):
            got = list(zip(self.tokens, self.finishes, strict=True))
            assert got == [(tokens, finish) for tokens, finish, _ in expected], self.uid


def one_by_one(record: Logprobs) -> list[Logprobs]:
    """A record for each token of ``record``."""
    count = len(record.ranks) // 4
    return [first_logprobs(skip_logprobs(record, at), 1) for at in range(count)]


def stop_string(outputs: list[int]) -> bool:
    return sum(outputs[-2:]) % 11 == 0


class World:
    def __init__(self, seed: int):
        rng = self.rng = random.Random(seed)
        self.drafting = random.Random(f"{seed} drafts")  # apart, so that a seed means what it meant before
        self.now = 0.0
        rows = rng.choice([1, 2, 3, 6, 10])
        self.config = EngineArgs(
            block_size=rng.choice([8, 8, 16]),
            max_num_seqs=rows,
            max_num_batched_tokens=rows + rng.choice([0, 1, 5, 40, 200]),
            enable_prefix_caching=rng.random() < 0.7,
            enable_chunked_prefill=rng.random() < 0.75,
            scheduling_policy=rng.choice(["fcfs", "priority"]),
        )
        self.core = Scheduler(self.config, clock=lambda: self.now)
        self.max_model_len = rng.choice([40, 64, 120])
        self.stores: dict[int, PageStore] = {}
        self.plans: dict[int, list[bytes]] = {}
        self.clients: dict[int, Client] = {}
        self.leases = 0
        self.refused = 0
        self.answers: list[BeamStopped] = []  # on their way from the detokenizer
        self.kills_left = rng.choice([0, 1, 3])
        self.prefixes = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(2)]
        for number in range(rng.choice([1, 1, 2, 3])):
            self.add_worker(number)

    # -- what may happen

    def add_worker(self, number: int) -> None:
        size, rng = self.config.block_size, self.rng
        need = -(-(self.max_model_len - 1) // size)
        blocks = need + rng.choice([0, 1, 3, 10, 40])
        self.leases += 1
        lease = Lease(1, number, self.leases)
        drafts, draft_rows = self.drafts()
        self.stores[number] = PageStore(self.config.max_num_seqs, blocks, size, VOCAB, drafts=drafts)
        self.plans[number] = []
        self.core.add_replica(
            Replica(number, lease, f"worker{self.leases}", self.config.max_num_seqs, blocks, size, self.max_model_len,
                    VOCAB, self.config.enable_prefix_caching, drafts=drafts, draft_rows=draft_rows)
        )  # fmt: skip

    def drafts(self) -> tuple[int, int]:
        """What a worker drafts, and for how many rows: half of them nothing."""
        return self.drafting.choice([0, 0, 0, 1, 3, 6]), self.drafting.choice([1, 2, 8])

    def arrive(self) -> None:
        rng = self.rng
        prompt = rng.choice([[], *self.prefixes])[: rng.randint(0, 40)]
        prompt = (prompt + [rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 20))])[: self.max_model_len - 1]
        prompt = prompt or [1]
        if not self.config.enable_chunked_prefill:
            prompt = prompt[: self.config.max_num_batched_tokens]
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3, 5]), max_tokens=rng.choice([1, 2, 9, 30]),
            stop_token_ids=rng.choice([[], [5], [5, EOS]]), logprobs=rng.choice([None, None, 0, 3]),
            prompt_logprobs=rng.choice([None, None, 0, 2]), skip_reading_prefix_cache=rng.choice([None, None, True]),
        )  # fmt: skip
        if rng.random() < 0.2:
            width = rng.choice([2, 2, 3, 4])
            n = rng.randint(1, width)
            params = SamplingParams(
                use_beam_search=True, temperature=0.0, n=n, best_of=width if n < width else None,
                max_tokens=rng.choice([1, 5, 12]), logprobs=rng.choice([None, 0, 3]),
                prompt_logprobs=rng.choice([None, None, 1]), early_stopping=rng.choice([True, False, "never"]),
                length_penalty=rng.choice([0.0, 1.0, 3.0]), stop=rng.choice([None, "x"]),
                stop_token_ids=rng.choice([[], [5]]), min_tokens=rng.choice([0, 0, 1]),
            )  # fmt: skip
        uid = len(self.clients) + 1
        client = Client(uid, prompt, params, rng.getrandbits(64), self.now, rng.choice([[], [EOS]]))
        self.clients[uid] = client
        self.core.submit("detok", client.submit(self.config.block_size, resume=False))

    def open_client(self) -> Client | None:
        clients = [c for c in self.clients.values() if not c.gone and c.live()]
        return self.rng.choice(clients) if clients else None

    def abort(self) -> None:
        if client := self.open_client():
            self.core.abort(client.uid, client.attempt)
            client.gone = True

    def stop(self) -> None:
        client = self.open_client()
        if client and not client.params.use_beam_search:
            index = self.rng.choice(client.live())
            self.core.stopped(Stopped(client.uid, client.attempt, index, len(client.tokens[index])))
            client.finishes[index] = Finish.ABORT

    def resubmit(self) -> None:
        """A loss on the path: some tokens never came, and a higher attempt starts from those that did."""
        if client := self.open_client():
            client.attempt += 1
            for index in client.live():
                kept = self.rng.randint(0, len(client.tokens[index]))
                client.tokens[index] = client.tokens[index][:kept]
                client.logprobs[index] = client.logprobs[index][:kept]
            if not any(client.tokens):
                client.prompt_logprobs = client.prompt_logprobs[: self.rng.randint(0, len(client.prompt_logprobs))]
            self.core.submit("detok", client.submit(self.config.block_size, resume=True))

    def answer(self) -> None:
        """The detokenizer's next answer comes."""
        if self.answers:
            self.core.beam_stopped(self.answers.pop(0))

    def _candidates(self, message: BeamTokens) -> None:
        client = self.clients[message.uid]
        if message.attempt == client.attempt:
            before = [[]] if message.step == 1 else client.candidates
            pairs = zip(from_i32(message.parents), from_i32(message.tokens), strict=True)
            client.candidates = [[*before[parent], token] for parent, token in pairs]
            stopped = [at for at, outputs in enumerate(client.candidates) if stop_string(outputs)]
            self.answers.append(BeamStopped(message.uid, message.attempt, message.step, i32(stopped)))

    def curse(self) -> None:
        """From now on no token can be drawn for one request, on the workers there are."""
        if (client := self.open_client()) and self.rng.random() < 0.3:
            client.cursed = True
            for store in self.stores.values():
                store.failing.add(client.uid)

    def preempt(self) -> None:
        running = [seq for replica in self.core.replicas.values() for seq in replica.sequences()]
        if running:
            self.core.preempt(self.rng.choice(running))

    def kill(self) -> None:
        if self.kills_left and self.core.replicas:
            self.kills_left -= 1
            replica = self.rng.choice(list(self.core.replicas.values()))
            self.core.end_lease(replica)
            if self.rng.random() < 0.8 or not self.core.replicas:
                self.add_worker(replica.number)

    def plan(self) -> None:
        for replica in self.rng.sample(list(self.core.replicas.values()), len(self.core.replicas)):
            while (plan := self.core.plan(replica)) is not None:
                self.plans[replica.number].append(encode(plan))
                self.core.check_integrity()

    def work(self) -> bool:
        """One replica's next step ends."""
        busy = [r for r in self.core.replicas.values() if self.plans[r.number]]
        if not busy:
            return False
        replica = self.rng.choice(busy)
        plan = decode_plan(self.plans[replica.number].pop(0))
        self.core.commit(replica, self.stores[replica.number].run(plan))
        return True

    def receive(self) -> None:
        for owner, message in self.core.outbox.take():
            assert owner == "detok" or isinstance(message, Heartbeat | Managed)
            if isinstance(message, Failed):
                assert self.may_fail(message), message
                self.clients[message.uid].gone = True
                self.refused += 1
            elif isinstance(message, BeamTokens):
                self._candidates(message)
            elif isinstance(message, PromptLogprobs):
                client = self.clients[message.uid]
                if message.attempt == client.attempt and not client.gone:
                    assert message.start == max(1, client.prompt_have())
                    assert not any(client.tokens)
                    client.prompt_logprobs.append(message.logprobs)
            elif isinstance(message, TokenBatch):
                self._tokens(message)

    def may_fail(self, message: Failed) -> bool:
        if message.status == 503:
            return self.clients[message.uid].cursed
        return message.status == 400 or (message.status == 500 and self.kills_left < 3)

    def _tokens(self, batch: TokenBatch) -> None:
        tokens, at, seen = from_i32(batch.tokens), 0, set()
        records = dict(zip(from_i32(batch.logprob_rows), batch.logprobs, strict=True))
        for row, (uid, attempt, index, offset, count, finish) in enumerate(zip(
            from_i64(batch.uids), from_i32(batch.attempts), from_i32(batch.indexes), from_i32(batch.offsets),
            from_i32(batch.counts), from_i8(batch.finishes), strict=True,
        )):  # fmt: skip
            new, at = tokens[at : at + count], at + count
            client = self.clients[uid]
            assert (uid, index) not in seen
            seen.add((uid, index))
            if attempt != client.attempt or client.gone or client.finishes[index] is not Finish.NONE:
                continue
            assert offset == len(client.tokens[index])
            client.tokens[index] += new
            if row in records:
                client.logprobs[index] += one_by_one(records[row])
            client.finishes[index] = Finish(finish)
        assert at == len(tokens)
        for uid in from_i64(batch.started_uids):
            self.clients[uid].starts += 1

    # -- a life

    def actions(self) -> list[Callable[[], None]]:
        return [self.abort, self.stop, self.resubmit, self.preempt, self.kill, self.curse]

    def pass_time(self) -> None:
        self.now += 0.01

    def run(self) -> None:
        rng = self.rng
        arrivals = rng.randint(1, 8)
        trouble = rng.choice([0.02, 0.1, 0.25])
        actions = self.actions()
        for turn in range(5000):
            self.pass_time()
            if arrivals and rng.random() < 0.3:
                arrivals -= 1
                self.arrive()
            if turn < 200 and rng.random() < trouble:
                rng.choice(actions)()
                self.core.check_integrity()
            if rng.random() < 0.8:
                self.plan()
            worked = rng.random() < 0.7 and self.work()
            self.core.check_integrity()
            if rng.random() < 0.7:
                self.receive()
            if rng.random() < 0.7:
                self.answer()
            if not arrivals and not worked and not self.core.requests:
                break
        self.receive()
        self.finish()

    def finish(self) -> None:
        assert not self.core.requests, f"{len(self.core.requests)} requests never ended"
        while self.work():
            pass
        for replica in self.core.replicas.values():
            assert replica.pool.used == 0
            assert replica.running == 0
            assert not replica.in_flight
        for client in self.clients.values():
            client.check(self.max_model_len)
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
