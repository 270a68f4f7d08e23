"""A cell in one process: the real loops over an in-memory link, with a clock and an order of events set by the test."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from paceline.actors.drafter import DrafterLoop
from paceline.actors.drafters import Drafter
from paceline.actors.memory_link import Fault, MemoryLink, faithful, memory_link
from paceline.actors.session import Limits
from paceline.actors.text import TextCodec, stream_of
from paceline.actors.torch_engine import TorchEngine
from paceline.actors.values import Delta, Finish, Request
from paceline.actors.verifier import Submit, Verifier, VerifierSettings
from transformers import AutoModelForCausalLM

KV_TOKENS = 2048


def engine_of(directory: Path, kv_tokens: int = KV_TOKENS, block_size: int = 16) -> TorchEngine:
    """An exact engine for a table model, which may be a broken one: load_engine would refuse NaN."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return TorchEngine(model.requires_grad_(False), kv_tokens, block_size)


class LocalCell:
    """The verifier with one drafter, or more.  Each step is one turn of one of them, drawn by `seed`, and some time.

    speed: how many turns a drafter gets per turn of the verifier, in the mean; 0 for a drafter that is stuck.
    waited: seconds that the verifier has spent waiting for drafts.  ends: by link, the verifier's and the drafter's.
    engine: one for `target`, where it shall not be the usual one.
    """

    def __init__(
        self,
        target: Path,
        drafter: Drafter,
        *,
        fault: Fault = faithful,
        settings: VerifierSettings | None = None,
        speed: float = 2.0,
        seed: int = 0,
        engine: TorchEngine | None = None,
    ) -> None:
        self.engine = engine or engine_of(target)
        self.now = self.waited = 0.0
        self.speed = speed
        self.rng = random.Random(seed)
        codec = TextCodec.load(target)
        limits = Limits(codec.eos_ids, self.engine.context_length, self.engine.vocab_size)
        compile = codec.compiler(self.engine.vocab_size)
        text = partial(stream_of, codec)
        self.verifier = Verifier(self.engine, limits, text, settings, lambda: self.now, compile=compile)
        self.drafters: dict[str, DrafterLoop] = {}
        self.ends: dict[str, tuple[MemoryLink, MemoryLink]] = {}
        self.drafter = self.add_drafter("drafter-0", drafter, fault=fault)
        self.verifier_end, self.drafter_end = self.ends["drafter-0"]
        self.deltas: dict[str, list[Delta]] = defaultdict(list)

    def add_drafter(
        self, name: str, drafter: Drafter, *, retrieval: bool = False, fault: Fault = faithful
    ) -> DrafterLoop:
        """One more drafter."""
        self.drafters[name] = DrafterLoop(drafter, lambda: self.now)
        self.connect(name, self.drafters[name], retrieval=retrieval, fault=fault)
        return self.drafters[name]

    def connect(self, name: str, loop: DrafterLoop, *, retrieval: bool = False, fault: Fault = faithful) -> None:
        """A link to a drafter, which may have others already."""
        ends = memory_link(name, self.verifier.inbox.put, loop.inbox.put, fault)
        self.verifier.add_link(ends[0], retrieval)
        loop.add_link(ends[1])
        self.ends[name] = ends

    def submit(self, request: Request) -> Submit:
        submit = Submit(request, self.deltas[request.id].append)
        self.verifier.inbox.put(submit)
        return submit

    def turn_verifier(self) -> None:
        """One turn; if it would rather wait, the clock goes on by at most that long."""
        for end, _ in self.ends.values():
            end.pump()
        assert self.verifier.take(0)
        wait = self.verifier.turn()
        self.verifier.check()
        self.engine.check()
        if wait:
            self.waited += min(wait, 0.01)
        self.now += min(wait, 0.01) if wait else 0.001

    def turn_drafter(self, name: str = "drafter-0") -> None:
        loop = self.drafters[name]
        self.ends[name][1].pump()
        assert loop.take(0)
        loop.turn()
        loop.check()

    def step(self) -> None:
        share = self.speed / (1 + self.speed)
        if self.rng.random() < share:
            self.turn_drafter(self.rng.choice(list(self.drafters)))
        else:
            self.turn_verifier()

    def run(self, requests: Iterable[Request], each_step: Callable[[int], None] = lambda _: None) -> list[Answer]:
        """Serve all of them together until they have ended."""
        wanted = list(requests)
        for request in wanted:
            self.submit(request)
        for count in range(20_000):
            if all(self.finish(request.id) for request in wanted):
                return [self.answer(request.id) for request in wanted]
            self.step()
            each_step(count)
        raise AssertionError(f"still running after {count} steps: {dict(self.verifier.counters)}")

    def finish(self, request_id: str) -> Finish | None:
        deltas = self.deltas[request_id]
        return deltas[-1].finish if deltas else None

    def answer(self, request_id: str) -> Answer:
        finish = self.finish(request_id)
        assert finish is not None
        return Answer(tuple(token for delta in self.deltas[request_id] for token in delta.token_ids), finish)

    def settle(self) -> None:
        """Let everything arrive, then check that nothing is held any more."""
        for _ in range(20):
            self.turn_verifier()
            for name in self.drafters:
                self.turn_drafter(name)
        assert not self.verifier.sessions
        assert not self.verifier.waiting
        assert self.engine.pool.free_blocks == self.engine.pool.blocks
        for name, loop in self.drafters.items():
            if self.ends[name][0].is_up and self.ends[name][0].faithful:
                assert not loop.drafts


class Answer:
    """What a client got: its tokens, and how it ended."""

    def __init__(self, tokens: tuple[int, ...], finish: Finish) -> None:
        self.tokens, self.finish, self.stats = tokens, finish, finish.stats
        assert finish.completion_tokens == len(tokens), "usage and delivered tokens differ"
