"""A cell in virtual time: the real loops, over links with a delay, with a target and a drafter that only take time.

Verifier and drafter each have a clock of their own, and whichever is behind takes the next turn.  A pass moves the
verifier's clock on by what a pass over so many nodes costs, a draft step the drafter's, and a message arrives when its
time has come.  So a minute of decoding takes a second, and every time in it is exact.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from paceline.actors.drafter import DrafterLoop
from paceline.actors.engine import Feed
from paceline.actors.inbox import Inbox
from paceline.actors.link import LinkEvent, LinkUp, Received
from paceline.actors.oracle import OracleDrafter, OracleSpec
from paceline.actors.schedules import Plan
from paceline.actors.session import Limits
from paceline.actors.values import Delta, Finish, Request, Sampling, Speculation
from paceline.actors.verifier import Submit, Verifier, VerifierSettings
from torch import Tensor

VOCAB = 32
_ROWS = torch.eye(VOCAB)
_FOREVER = 1e9


@dataclass(frozen=True, slots=True)
class World:
    """Seconds that things take.  A pass over N rows: base + node * N.  A draft step: draft, however many leaves.

    latency: each way of the link.  alpha, second: how good the drafter's guesses are; see OracleSpec.
    """

    base: float = 0.1
    node: float = 0.0
    draft: float = 0.01
    latency: float = 0.0
    alpha: float = 0.8
    second: float = 0.5

    def pass_seconds(self, rows: int) -> float:
        return self.base + self.node * rows


class Clock:
    """One loop's time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(slots=True)
class _Sequence:
    """script: all the tokens of its text.  depths: of the pending slots, 0 for a child of the committed position."""

    script: Sequence[int] = ()
    length: int = 0
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)


class ScriptedEngine:
    """An Engine whose sequences say what `script` says of their first token; its passes take `seconds(rows)`."""

    vocab_size, context_length, block_size = VOCAB, 1_000_000, 16
    free_blocks = 1_000_000

    def __init__(self, script: Callable[[int], Sequence[int]], clock: Clock, seconds: Callable[[int], float]) -> None:
        self._script, self._clock, self._seconds = script, clock, seconds
        self._sequences: dict[int, _Sequence] = {}
        self._opened = 0
        self.passes: list[tuple[float, float, int]] = []

    def open(self, tokens: Sequence[int] = (), salt: bytes | None = None) -> int:
        self._opened += 1
        self._sequences[self._opened] = _Sequence()
        return self._opened

    def cost(self, tokens: Sequence[int], salt: bytes | None = None) -> int:
        return 0

    def spare(self, sequence: int) -> int:
        return 0

    def close(self, sequence: int) -> None:
        self._sequences.pop(sequence, None)

    def step(self, feeds: Sequence[Feed]) -> list[Tensor]:
        started = self._clock.now
        rows = sum(len(feed.tokens) for feed in feeds)
        self._clock.sleep(self._seconds(rows))
        self.passes.append((started, self._clock.now, rows))
        return [self._feed(feed) for feed in feeds]

    def _feed(self, feed: Feed) -> Tensor:
        state = self._sequences[feed.sequence]
        if not state.length and not state.depths:
            state.script = self._script(feed.tokens[0])
        first = len(state.depths)
        for parent in feed.parents:
            state.parents.append(parent)
            state.depths.append(state.depths[parent] + 1 if parent >= 0 else 0)
        # A row off the path is never looked at, so every row may say what the text says at its position.
        return _ROWS[[state.script[state.length + state.depths[first + row] + 1] for row in feed.rows]]

    def commit(self, sequence: int, path: Sequence[int]) -> dict[int, int]:
        state = self._sequences[sequence]
        assert [state.parents[slot] for slot in path] == [-1, *path[:-1]], "a broken path"
        state.length += len(path)
        state.parents, state.depths = [], []
        return {}

    def truncate(self, sequence: int, length: int) -> None:
        state = self._sequences[sequence]
        state.length = min(state.length, length)
        state.parents, state.depths = [], []

    def length(self, sequence: int) -> int:
        return self._sequences[sequence].length

    def pending(self, sequence: int) -> int:
        return len(self._sequences[sequence].depths)

    def fits(self, lengths: Sequence[int]) -> bool:
        return True


class DelayedLink:
    """One end of a link: what is sent at a time by its owner's clock arrives `latency` later."""

    def __init__(self, name: str, clock: Clock, latency: float) -> None:
        self.name, self._clock, self._latency = name, clock, latency
        self.peer: DelayedLink
        self._arriving: list[tuple[float, int, bytes]] = []
        self._count = 0

    def send(self, data: bytes) -> bool:
        self._count += 1
        heapq.heappush(self.peer._arriving, (self._clock.now + self._latency, self._count, data))
        return True

    def close(self) -> None:
        raise NotImplementedError("a simulated link stays up")

    @property
    def next_arrival(self) -> float:
        return self._arriving[0][0] if self._arriving else _FOREVER

    def deliver(self, inbox: Inbox[LinkEvent]) -> None:
        """Hand over what has arrived by now."""
        while self._arriving and self._arriving[0][0] <= self._clock.now:
            arrived, _, data = heapq.heappop(self._arriving)
            inbox.put(Received(self.name, 1, data, arrived))


@dataclass(slots=True)
class Stream:
    """What one request's client sees: (time, tokens) per delta, from `submitted` on."""

    submitted: float
    deltas: list[tuple[float, int]] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def seconds(self) -> float:
        return self.deltas[-1][0] - self.submitted

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.deltas)

    @property
    def rate(self) -> float:
        """Tokens per second after the first delta, which holds the prefill."""
        return (self.tokens - self.deltas[0][1]) / (self.deltas[-1][0] - self.deltas[0][0])


class SimulatedCell:
    """One verifier and one drafter.  `world` may be replaced while it runs."""

    def __init__(self, world: World, settings: VerifierSettings | None = None, seed: int = 0) -> None:
        self.world, self._seed = world, seed
        self._scripts: dict[int, Sequence[int]] = {}
        self.verifier_clock, self.drafter_clock = Clock(), Clock()
        self.engine = ScriptedEngine(self.script, self.verifier_clock, lambda rows: self.world.pass_seconds(rows))
        self.verifier = Verifier(
            self.engine,
            Limits(frozenset(), 1_000_000, self.engine.vocab_size),
            lambda _: Silent(),
            settings,
            self.verifier_clock,
        )
        spec = OracleSpec(world.alpha, world.draft / world.base, world.second)
        self.oracle = OracleDrafter(spec, self.drafter_clock.sleep, self.drafter_clock)
        self.drafter = DrafterLoop(self.oracle, self.drafter_clock)
        self._ends = (
            DelayedLink("drafter-0", self.verifier_clock, world.latency),
            DelayedLink("drafter-0", self.drafter_clock, world.latency),
        )
        self._ends[0].peer, self._ends[1].peer = self._ends[1], self._ends[0]
        self.verifier.add_link(self._ends[0])
        self.drafter.add_link(self._ends[1])
        self.verifier.inbox.put(LinkUp("drafter-0", 1))
        self.drafter.inbox.put(LinkUp("drafter-0", 1))
        self._verifier_wakes = self._drafter_wakes = 0.0
        self._requests = 0
        self.streams: list[Stream] = []
        self._plans: dict[str, Plan] = {}

    def script(self, first: int) -> Sequence[int]:
        """The text that begins with token `first`."""
        if first not in self._scripts:
            rng = random.Random(f"{self._seed}/{first}")
            self._scripts[first] = [first, *rng.choices(range(VOCAB), k=4000)]
        return self._scripts[first]

    def submit(self, speculation: Speculation, tokens: int) -> Stream:
        """A request comes in now."""
        first = self._requests % VOCAB
        text = self.script(first)
        self.oracle.teach(text[:1], text[1:], self.world.base)
        stream = Stream(self.verifier_clock.now)
        request = Request(f"r{self._requests}", (first,), Sampling(), tokens, ignore_eos=True, speculation=speculation)
        self._requests += 1

        def emit(delta: Delta) -> None:
            if delta.token_ids:
                stream.deltas.append((self.verifier_clock.now, len(delta.token_ids)))
            stream.finish = delta.finish

        self.verifier.inbox.put(Submit(request, emit))
        self._verifier_wakes = self.verifier_clock.now
        self.streams.append(stream)
        return stream

    def step(self) -> None:
        """One turn of the loop that is behind."""
        verifier_next = max(self.verifier_clock.now, min(self._verifier_wakes, self._ends[0].next_arrival))
        drafter_next = max(self.drafter_clock.now, min(self._drafter_wakes, self._ends[1].next_arrival))
        if verifier_next <= drafter_next:
            self._turn_verifier(verifier_next)
        else:
            self._turn_drafter(drafter_next)

    def _turn_verifier(self, when: float) -> None:
        clock = self.verifier_clock
        clock.now = max(clock.now, when)
        self._ends[0].deliver(self.verifier.inbox)
        assert self.verifier.take(0)
        wait = self.verifier.turn()
        self._plans |= {session.request.id: session.plan for session in self.verifier.sessions.values()}
        self._verifier_wakes = clock.now + wait if wait is not None else _FOREVER

    def _turn_drafter(self, when: float) -> None:
        clock = self.drafter_clock
        clock.now = max(clock.now, when)
        self._ends[1].deliver(self.drafter.inbox)
        assert self.drafter.take(0)
        self._drafter_wakes = clock.now if self.drafter.turn() else _FOREVER

    @property
    def plans(self) -> list[Plan]:
        """How the sessions were speculated when they were last looked at, by the time they began."""
        return list(self._plans.values())

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Go on until all requests have ended, or until something else."""
        done = until or (lambda: all(stream.finish for stream in self.streams))
        for _ in range(1_000_000):
            if done():
                return
            self.step()
        raise AssertionError("the simulation does not end")

    def serve(self, speculation: Speculation, tokens: int, sessions: int = 1, requests: int = 1) -> float:
        """Keep `sessions` requests of `tokens` each running until `requests` have ended; tokens per second in all."""
        started, before = self.verifier_clock.now, len(self.streams)
        for _ in range(min(sessions, requests)):
            self.submit(speculation, tokens)
        mine = self.streams[before:]
        while len(mine) < requests:
            running = len(mine) - sessions
            self.run(lambda ended=running: sum(s.finish is not None for s in mine) > ended)
            mine.append(self.submit(speculation, tokens))
        self.run()
        return sum(stream.tokens for stream in mine) / (self.verifier_clock.now - started)


class Silent:
    """A TextStream that has no text."""

    def push(self, token_ids: tuple[int, ...]) -> tuple[str, int | None]:
        return "", None

    def flush(self) -> str:
        return ""
