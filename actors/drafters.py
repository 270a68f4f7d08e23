"""Drafters: what guesses the tokens.  Each sits behind the same four calls, and none knows of links or schedules.

A guess can be anything: the verifier's rule decides what it is worth.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paceline.actors.engine import Engine, Feed
from paceline.actors.rule import perturbed
from paceline.actors.tree import ROOT, DraftTree
from paceline.actors.values import Sampling
from torch import Tensor

CANDIDATES = 8
"""How many children a model drafter remembers of each node it has evaluated: the widest that a node may be expanded."""

RUN_AHEAD = 128
"""Cached positions set aside per session for guesses, on top of what the request itself can reach."""


class DrafterFull(RuntimeError):
    """No room for another session; it goes undrafted."""


class Guess(NamedTuple):
    """A guessed token.  parent: the index of an earlier guess of the same answer, or -1 for the asked node."""

    token: int
    logq: float
    parent: int = -1


@dataclass(frozen=True, slots=True)
class Ask:
    """Guess what follows node `parent` (or ROOT) of a tree: `width` children, and `depth` levels if they are free."""

    session: int
    tree: DraftTree
    parent: int
    width: int = 1
    depth: int = 1


class Drafter(Protocol):
    """Guesses for many sessions at once.  version: changes whenever the same question may get another answer."""

    version: int

    def open(self, tokens: Sequence[int], sampling: Sampling, max_tokens: int) -> int:
        """Begin a session after these committed tokens and return its id.  Raises DrafterFull."""
        ...

    def close(self, session: int) -> None:
        """Forget a session; closing it again does nothing."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[tuple[Guess, ...] | None]:
        """One step for all the asks; per ask its guesses, () if there is nothing to guess, None if it needs more steps.

        Guesses stand after their parents.  If it raises, every session is as it was.
        """
        ...

    def reroot(self, session: int, tree: DraftTree, tokens: Sequence[int]) -> None:
        """`tokens` were committed; `tree` is the session's tree before that."""
        ...


@dataclass(slots=True)
class _History:
    """Committed tokens, and where each n-gram of them was last continued."""

    tokens: list[int]
    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0

    def index(self, longest: int) -> None:
        """Note, for every n-gram that ends before a known token, the position of that token."""
        for end in range(max(1, self.indexed), len(self.tokens)):
            for n in range(1, min(longest, end) + 1):
                self.after[tuple(self.tokens[end - n : end])] = end
        self.indexed = len(self.tokens)


class NgramDrafter:
    """Prompt lookup: what followed the last few tokens when they last occurred in the same session.

    After Saxena, "Prompt Lookup Decoding" (2023).  It needs no model, and no session sees another one's text.
    """

    LONGEST = 3
    LOGQ = -0.6931471805599453
    """Log of one half: a stand-in for a probability that a lookup does not have."""

    def __init__(self) -> None:
        self.version = 0
        self._histories: dict[int, _History] = {}
        self._ids = itertools.count()

    def open(self, tokens: Sequence[int], sampling: Sampling, max_tokens: int) -> int:
        """See Drafter.open."""
        session = next(self._ids)
        history = self._histories[session] = _History(list(tokens))
        history.index(self.LONGEST)
        return session

    def close(self, session: int) -> None:
        """See Drafter.close."""
        self._histories.pop(session, None)

    def reroot(self, session: int, tree: DraftTree, tokens: Sequence[int]) -> None:
        """See Drafter.reroot."""
        history = self._histories[session]
        history.tokens += tokens
        history.index(self.LONGEST)

    def propose(self, asks: Sequence[Ask]) -> list[tuple[Guess, ...] | None]:
        """See Drafter.propose.  A chain of up to `depth` tokens costs no more than one of them."""
        return [self._lookup(ask) for ask in asks]

    def _lookup(self, ask: Ask) -> tuple[Guess, ...]:
        history = self._histories[ask.session]
        context = (*history.tokens[-self.LONGEST :], *ask.tree.tokens(ask.parent))
        for n in range(min(self.LONGEST, len(context)), 0, -1):
            start = history.after.get(context[-n:])
            if start is not None:
                found = history.tokens[start : start + ask.depth]
                return tuple(Guess(token, self.LOGQ, i - 1) for i, token in enumerate(found))
        return ()


class _Candidate(NamedTuple):
    token: int
    logq: float


@dataclass(slots=True)
class _Branch:
    """One session of a model drafter.

    tokens: the committed ones; the engine has cached some of them, the rest is fed before anything else.
    slots: the engine's pending slot of every evaluated node.  candidates: what it guesses after these and after ROOT.
    """

    sequence: int
    sampling: Sampling
    tokens: list[int]
    reserved: int
    slots: dict[int, int] = field(default_factory=dict)
    candidates: dict[int, tuple[_Candidate, ...]] = field(default_factory=dict)


class ModelDrafter:
    """A causal language model, which may be much smaller than the target but has the same tokenizer.

    Evaluated nodes stay in its cache across re-roots and are never computed twice.  It ranks its guesses with the
    noise that the target's token will be drawn with, so that both fall on the same token more often.

    prefill_chunk: committed tokens fed per session and step, so that a long prompt does not hold up other sessions.
    """

    def __init__(self, engine: Engine, prefill_chunk: int = 256) -> None:
        self.version = 0
        self._engine, self._chunk = engine, prefill_chunk
        self._branches: dict[int, _Branch] = {}

    def open(self, tokens: Sequence[int], sampling: Sampling, max_tokens: int) -> int:
        """See Drafter.open."""
        need = min(len(tokens) + max_tokens, self._engine.context_length) + RUN_AHEAD
        if not self._engine.fits([need, *(branch.reserved for branch in self._branches.values())]):
            raise DrafterFull(f"no room for {need} more cached positions beside {len(self._branches)} sessions")
        sequence = self._engine.open()
        self._branches[sequence] = _Branch(sequence, sampling, list(tokens), need)
        return sequence

    def close(self, session: int) -> None:
        """See Drafter.close."""
        if self._branches.pop(session, None) is not None:
            self._engine.close(session)

    def reroot(self, session: int, tree: DraftTree, tokens: Sequence[int]) -> None:
        """See Drafter.reroot."""
        branch = self._branches[session]
        branch.tokens += tokens
        path = tree.follow(tokens)
        evaluated = list(itertools.takewhile(branch.slots.__contains__, path))
        if len(evaluated) == len(tokens):
            self._keep_below(branch, evaluated)
            return
        # The last committed token has not been evaluated, so no guess below it has been either.
        if evaluated:
            self._engine.commit(session, [branch.slots[id] for id in evaluated])
        self._engine.truncate(session, self._engine.length(session))
        branch.slots, branch.candidates = {}, {}

    def _keep_below(self, branch: _Branch, path: Sequence[int]) -> None:
        renamed = self._engine.commit(branch.sequence, [branch.slots[id] for id in path])
        kept = {id: renamed[slot] for id, slot in branch.slots.items() if slot in renamed}
        root = branch.candidates[path[-1]]
        branch.candidates = {ROOT: root} | {id: branch.candidates[id] for id in kept}
        branch.slots = kept

    def propose(self, asks: Sequence[Ask]) -> list[tuple[Guess, ...] | None]:
        """See Drafter.propose.  One batched forward over all asks whose answer is not known yet."""
        self._evaluate(asks)
        return [self._answer(ask) for ask in asks]

    def _answer(self, ask: Ask) -> tuple[Guess, ...] | None:
        branch = self._branches[ask.session]
        found = branch.candidates.get(ask.parent)
        if found is None:
            return () if self._beyond(branch, ask) else None
        return tuple(Guess(token, logq) for token, logq in found[: ask.width])

    def _beyond(self, branch: _Branch, ask: Ask) -> bool:
        """Whether evaluating the asked node would need a position that the drafter does not have."""
        depth = ask.tree.nodes[ask.parent].depth if ask.parent != ROOT else 0
        return len(branch.tokens) + depth > self._engine.context_length

    def _evaluate(self, asks: Sequence[Ask]) -> None:
        """Feed what the asked nodes need, each session once."""
        plans: dict[int, _Plan] = {}
        for ask in asks:
            branch = self._branches[ask.session]
            if ask.parent not in branch.candidates and not self._beyond(branch, ask):
                plans.setdefault(ask.session, _Plan(branch)).want(ask)
        feeds = [plan.feed(self._engine, self._chunk) for plan in plans.values()]
        for plan, logits in zip(plans.values(), self._engine.step(feeds) if feeds else (), strict=True):
            plan.take(self._engine, logits)


class _Plan:
    """What one session feeds in one step: a chunk of its uncached committed tokens, or the nodes asked for."""

    def __init__(self, branch: _Branch) -> None:
        self._branch = branch
        self._tail: list[int] = []
        self._nodes: dict[int, tuple[int, int]] = {}  # id -> (slot, depth)
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._rows: list[int] = []
        self._asks: list[Ask] = []

    def want(self, ask: Ask) -> None:
        """Also answer this."""
        self._asks.append(ask)

    def feed(self, engine: Engine, chunk: int) -> Feed:
        """The engine's part of the plan."""
        sequence = self._branch.sequence
        uncached = self._branch.tokens[engine.length(sequence) :]
        if uncached:
            self._tail = uncached[:chunk]
            count = len(self._tail)
            rows = (count - 1,) if count == len(uncached) else ()
            return Feed(sequence, tuple(self._tail), tuple(range(-1, count - 1)), rows)
        self._first_slot = engine.pending(sequence)
        for ask in self._asks:
            self._add_path(ask)
        return Feed(sequence, tuple(self._tokens), tuple(self._parents), tuple(range(len(self._tokens))))

    def _add_path(self, ask: Ask) -> None:
        """Plan the nodes from the root down to the asked one, as far as they are neither cached nor planned."""
        above = -1
        for depth, id in enumerate(ask.tree.path(ask.parent), start=1):
            known = self._branch.slots.get(id)
            if known is None and id not in self._nodes:
                self._nodes[id] = (self._first_slot + len(self._tokens), depth)
                self._tokens.append(ask.tree.nodes[id].token)
                self._parents.append(above)
            above = known if known is not None else self._nodes[id][0]

    def take(self, engine: Engine, logits: Tensor) -> None:
        """Note what the step has brought."""
        branch = self._branch
        if self._tail:
            engine.commit(branch.sequence, range(len(self._tail)))
            if len(logits):
                branch.candidates[ROOT] = _rank(logits[0], branch.sampling, len(branch.tokens))
            return
        for (id, (slot, depth)), row in zip(self._nodes.items(), logits, strict=True):
            branch.slots[id] = slot
            branch.candidates[id] = _rank(row, branch.sampling, len(branch.tokens) + depth)


def _rank(logits: Tensor, sampling: Sampling, position: int) -> tuple[_Candidate, ...]:
    """The likeliest tokens at `position`, the best first.

    Their log q is that of the scores which the noise has been added to: it says how sure the guess is that the target
    will fall on the same token, which the drafter's own probability does not when the noise is known.
    """
    scores = perturbed(logits, sampling, position).log_softmax(-1)
    best = scores.topk(min(CANDIDATES, scores.numel()))
    pairs: Iterable[tuple[int, float]] = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(_Candidate(token, min(logq, 0.0)) for token, logq in pairs if logq > -float("inf"))
