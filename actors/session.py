"""One request's life in the verifier: its committed tokens, its mirror of the draft tree, and where it ends."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from paceline.actors.constraints import Compile, constraints_of, shaper_of
from paceline.actors.logprobs import logprobs
from paceline.actors.messages import GrowthMessage, Open, Verdict
from paceline.actors.rule import Edit, Outcome
from paceline.actors.schedules import MAX_NODES, plan_of
from paceline.actors.tree import ROOT, DraftTree, Growth, NewNode, Subtree
from paceline.actors.values import Delta, ErrorCode, Finish, FinishReason, Request, Stats, TokenLogprobs
from torch import Tensor

log = logging.getLogger(__name__)

MAX_FEEDERS = 16
"""Drafters that may grow one session."""


class TextStream(Protocol):
    """Turns committed ids into text, and finds the stop strings in it."""

    def push(self, token_ids: tuple[int, ...]) -> tuple[str, int | None]:
        """The text that these ids complete; and, if a stop string is complete, how many of the ids it took."""

    def flush(self) -> str:
        """The text held back so far; nothing may be pushed afterwards."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the target allows: its end-of-sequence ids, positions per sequence, and columns of its logits."""

    eos_ids: frozenset[int]
    context_length: int
    vocab_size: int


@dataclass(slots=True)
class Feeder:
    """One drafter's part in a session.

    number: which of the session's feeders it is; ids of nodes are told apart by it.  epoch: this life of the session's
    slot, as that drafter knows it; never used again.  heard: something came from it in this epoch.  done_at: the
    base_len below which it will grow no more.  resync: growth of it is missing here.
    """

    name: str
    number: int
    epoch: int
    heard: bool = False
    done_at: int = -1
    resync: bool = False

    def own(self, id: int) -> int:
        """The id in the mirror of what this drafter calls `id`."""
        return id * MAX_FEEDERS + self.number if id != ROOT else ROOT


class Session:
    """The verifier's record of one request.

    slot: its name towards the drafters; a slot is used again, a feeder's epoch never.  sequence: its id in the engine.
    plan: how it is speculated now.  ready_at: since when it could be verified, None where that has not been asked.
    guessed: the last pass's outcome had been guessed to its last token.  hit: and there was a draft below it already.
    verdict_at: when the last pass ended, 0 before the first one.  served: the number of that pass.
    follows: another session reads the same prompt for it.
    """

    def __init__(
        self, request: Request, slot: int, limits: Limits, text: TextStream, compile: Compile | None = None
    ) -> None:
        self.request, self.slot = request, slot
        self.sequence = -1
        self.plan = plan_of(request.speculation)
        self.tokens = list(request.prompt)
        self.mirror = DraftTree(len(self.tokens))
        self.feeders: dict[str, Feeder] = {}
        self.hit = self.guessed = False
        self.served = 0
        self.follows = False
        self.ready_at: float | None = None
        self.verdict_at = 0.0
        self._limits, self._text = limits, text
        self._stops = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else limits.eos_ids)
        self._constraints = constraints_of(request, limits.eos_ids)
        self._shaper = shaper_of(self._constraints, request.prompt, (), limits.vocab_size, compile)
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._drafted = self._accepted = self._passes = self._hits = 0
        self._waited = 0.0
        self._positions: list[list[int]] = []

    @property
    def completion(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """How many more tokens may come, by max_tokens and the context; at least 1 while the session runs."""
        length = min(len(self.request.prompt) + self.request.max_tokens, self._limits.context_length)
        return length - len(self.tokens)

    @property
    def drafting(self) -> bool:
        """Whether a drafter has been heard from, so that waiting for it can pay."""
        return any(feeder.heard for feeder in self.feeders.values())

    def growing(self) -> list[Feeder]:
        """The drafters that may still grow something below this prefix."""
        base_len = self.mirror.base_len
        return [feeder for feeder in self.feeders.values() if feeder.heard and feeder.done_at < base_len]

    def attach(self, name: str, epoch: int) -> Open:
        """Begin to be drafted by `name` under a new epoch, and what to tell it; at most MAX_FEEDERS may be attached."""
        taken = {feeder.number for feeder in self.feeders.values() if feeder.name != name}
        number = next(number for number in range(MAX_FEEDERS) if number not in taken)
        self.drop(name)
        self.feeders[name] = Feeder(name, number, epoch)
        return Open(
            self.slot,
            epoch,
            tuple(self.tokens),
            self.request.sampling,
            self.plan,
            len(self.request.prompt),
            self._constraints,
        )

    def drop(self, name: str) -> None:
        """Go on without this drafter.  What it has grown is forgotten with it, for its ids may come again."""
        feeder = self.feeders.pop(name, None)
        if feeder is None:
            return
        kept = [node for node in self.mirror.nodes.values() if node.id % MAX_FEEDERS != feeder.number]
        offered = (NewNode(node.id, node.parent, node.token, node.logq) for node in kept)
        self.mirror = DraftTree(len(self.tokens)).grow(offered, len(self.tokens)).tree

    def grow(self, feeder: Feeder, message: GrowthMessage, vocab_size: int) -> Growth:
        """Take in what a drafter has grown; tokens outside the target's vocabulary are left out."""
        nodes = (
            NewNode(feeder.own(node.id), feeder.own(node.parent), node.token, node.logq)
            for node in message.nodes
            if node.token < vocab_size
        )
        growth = self.mirror.grow(nodes, message.base_len)
        # Growth below an older prefix may hang under a branch that was dropped here; below this one, nothing was.
        feeder.resync |= growth.orphaned > 0 and message.base_len == self.mirror.base_len
        # A drafter may overshoot its own bound by a step.
        self.mirror = growth.tree.cut(2 * MAX_NODES * len(self.feeders))
        feeder.heard = True
        if message.done:
            feeder.done_at = message.base_len
        return growth

    def be_ready(self, now: float) -> None:
        """It could be verified from now on; what was grown during its last pass has been taken in."""
        self.ready_at = now
        follows = self.verdict_at > 0
        self.guessed = follows and self.mirror.base_len - 1 in self.mirror.trail.values()
        self.hit = follows and len(self.mirror) > 0
        self._hits += self.hit

    def stand_still(self) -> None:
        """The next pass will not follow the last one."""
        self.ready_at, self.verdict_at = None, 0.0

    def within(self, tree: Subtree) -> Subtree:
        """`tree` without nodes deeper than was asked for, or so deep that their tokens could not be delivered."""
        depths, deepest = tree.depths, self.remaining - 1
        if self.request.speculation.max_k is not None:
            deepest = min(deepest, self.request.speculation.max_k)
        if max(depths, default=0) <= deepest:
            return tree
        return self.mirror.subtree(id for id, depth in zip(tree.ids, depths, strict=True) if depth <= deepest)

    def best(self, tree: Subtree, count: int) -> Subtree:
        """The `count` nodes of `tree` of highest score.  They always form a tree, since log q is never above 0."""
        if len(tree.ids) <= count:
            return tree
        nodes = [self.mirror.nodes[id] for id in tree.ids]
        nodes.sort(key=lambda node: (-node.score, node.depth))
        return self.mirror.subtree(node.id for node in nodes[:count])

    @property
    def edit(self) -> Edit | None:
        """What the constraints do to the logits after the committed tokens."""
        return self._shaper

    @property
    def unread(self) -> bool:
        """Whether log-probabilities of the prompt are still wanted, so that all of it has to be read."""
        wanted = self.request.prompt_logprobs is not None
        return wanted and len(self._prompt_logprobs) < len(self.request.prompt) - 1

    def read(self, start: int, rows: Tensor) -> None:
        """Note the log-probabilities of the prompt's tokens.  rows: logits [n, V], the first one after `start`."""
        known = 1 + len(self._prompt_logprobs)
        tokens = self.request.prompt[start + 1 : start + 1 + len(rows)]
        # What was read before the session paused is read again.
        skip = max(0, known - (start + 1))
        self._prompt_logprobs += logprobs(rows[skip : len(tokens)], tokens[skip:], self.request.prompt_logprobs or 0)

    def commit(self, outcome: Outcome, tree: Subtree, logits: Tensor, waited: float) -> Delta:
        """Take in what one pass over `tree` decided, after a draft had been waited for for `waited` seconds.

        logits: [1 + N, V], those that the pass was decided by.
        """
        tokens, text, reason = self._cut(outcome.tokens)
        if self._shaper is not None:
            self._shaper.advance(tokens)
        self.tokens += tokens
        self.mirror = self.mirror.reroot(tokens)
        self.ready_at = None
        self._passes += 1
        self._waited += waited
        # Neither drafts nor acceptance count behind the end of the request.
        accepted, seen = min(len(outcome.path), len(tokens)), [d for d in tree.depths if not reason or d <= len(tokens)]
        self._accepted += accepted
        self._drafted += len(seen)
        self._count_positions(max(seen, default=0), accepted)
        finish = self.finish(reason) if reason is not None else None
        return Delta(tokens, text, finish, self._logprobs(outcome, tokens, logits), self._take_prompt_logprobs())

    def _logprobs(self, outcome: Outcome, tokens: tuple[int, ...], logits: Tensor) -> tuple[TokenLogprobs, ...]:
        """Those of the committed tokens, if they are wanted."""
        if self.request.top_logprobs is None:
            return ()
        rows = [0, *(1 + node for node in outcome.path)][: len(tokens)]
        return tuple(logprobs(logits[rows], tokens, self.request.top_logprobs))

    def _take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Those of the prompt, with the first tokens."""
        return tuple(self._prompt_logprobs) if self._passes == 1 else ()

    def _count_positions(self, drafted: int, accepted: int) -> None:
        while len(self._positions) < drafted:
            self._positions.append([0, 0])
        for depth, counts in enumerate(self._positions[:drafted]):
            counts[0] += 1
            counts[1] += depth < accepted

    def verdicts(self, tokens: tuple[int, ...]) -> Iterable[tuple[Feeder, Verdict]]:
        """What to tell each drafter after `tokens`, the last ones, were committed."""
        base_len = len(self.tokens) - len(tokens)
        for feeder in self.feeders.values():
            yield feeder, Verdict(self.slot, feeder.epoch, base_len, tokens, self.plan, feeder.resync)
            feeder.resync = False

    def _cut(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str, FinishReason | None]:
        """The tokens up to where the request ends, their text, and why it ends there, if it does."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self._stops), None)
        complete = self._shaper.end(tokens[:end]) if self._shaper is not None else None
        kept = tokens[: min(n for n in (self.remaining, end, complete) if n is not None)]
        # The text of a stop token goes the way of a stop string.
        silent = len(kept) == end and not self.request.include_stop
        text, stopped = self._text.push(kept[:-1] if silent else kept)
        if stopped is not None:
            return kept[:stopped], text, "stop"
        if len(kept) in (end, complete):
            return kept, text + self._text.flush(), "stop"
        if len(kept) == self.remaining:
            return kept, text + self._text.flush(), "length"
        return kept, text, None

    def held_text(self) -> str:
        """The text of delivered ids that was held back; for a session that is cut short."""
        try:
            return self._text.flush()
        except Exception:
            log.exception("the last text of request %s is lost", self.request.id)
            return ""

    def finish(self, reason: FinishReason, error: str = "", code: ErrorCode = "") -> Finish:
        """The end of this request, as it stands now."""
        positions = tuple((drafted, accepted) for drafted, accepted in self._positions)
        name = self.request.speculation.schedule
        stats = Stats(name, self._drafted, self._accepted, self._passes, self._hits, self._waited, positions)
        prompt, seed = len(self.request.prompt), self.request.sampling.seed
        return Finish(reason, prompt, self.completion, seed, stats, error, code)
