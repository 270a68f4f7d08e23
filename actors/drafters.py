"""Drafters: what guesses the tokens.  Each sits behind the same four calls, and none knows of links or loops.

A guess can be anything: the verifier's rule decides what it is worth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paceline.actors.constraints import Compile, Shaper, shaper_of
from paceline.actors.cross_vocabulary import Translation
from paceline.actors.engine import Engine, Feed
from paceline.actors.grammar import GrammarError
from paceline.actors.ranking import Candidate, Ranker, Rows
from paceline.actors.schedules import MAX_CHILDREN, MAX_NODES
from paceline.actors.tree import ROOT, DraftTree
from paceline.actors.values import FREE, Constraints, Sampling
from paceline.actors.vocabulary import check_head
from torch import Tensor

CANDIDATES = MAX_CHILDREN
"""How many children a model drafter remembers of each node it has evaluated: the widest that a node may be expanded."""

RUN_AHEAD = MAX_NODES
"""How many nodes of one session may be evaluated at once: a whole tree."""

_Translate = Callable[[Sequence[int]], Sequence[int]]


class DrafterFull(RuntimeError):
    """No room for another session, or nothing to be done for it; it goes undrafted."""


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


@dataclass(frozen=True, slots=True)
class Start:
    """What a session begins with: all its committed tokens, of which the first prompt_len are the prompt's."""

    tokens: Sequence[int]
    sampling: Sampling
    prompt_len: int = 0
    constraints: Constraints = FREE


class Drafter(Protocol):
    """Guesses for many sessions at once.  version: changes whenever the same question may get another answer."""

    version: int

    def open(self, start: Start) -> int:
        """Begin a session and return its id.  Raises DrafterFull."""
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

    def open(self, start: Start) -> int:
        """See Drafter.open."""
        session = next(self._ids)
        history = self._histories[session] = _History(list(start.tokens))
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


@dataclass(slots=True)
class _Branch:
    """One session of a model drafter.

    tokens: the committed ones as the model is fed them; the engine has cached some of them, the rest is fed before
    anything else.  length: how many they are to the target.
    edit: what the request's constraints do to the logits below them.
    slots: the engine's pending slot of every evaluated node.  candidates: what it guesses after these and after ROOT.
    """

    sequence: int
    sampling: Sampling
    tokens: list[int]
    length: int
    edit: Shaper | None = None
    slots: dict[int, int] = field(default_factory=dict)
    candidates: dict[int, tuple[Candidate, ...]] = field(default_factory=dict)


class ModelDrafter:
    """A causal language model, which may be much smaller than the target but has the same tokenizer, or a translation.

    Evaluated nodes stay in its cache across re-roots and are never computed twice.  It ranks its guesses with the
    noise that the target's token will be drawn with, so that both fall on the same token more often.

    prefill_chunk: committed tokens fed per step, so that a long prompt does not hold up what others draft.
    head: the token ids that the engine's logits are of, if its head was trimmed to them (see vocabulary.trim_head);
    no other token is guessed.  Raises ValueError if these cannot be ids of its vocabulary.
    compile: makes what follows a grammar; without it, sessions that have one go undrafted.
    translation: between the target's tokens and the engine's, whose head was trimmed to translation.drafter_ids; `head`
    is left out then.  Asks, guesses, constraints and positions are the target's all the same.
    """

    def __init__(
        self,
        engine: Engine,
        prefill_chunk: int = 256,
        head: Sequence[int] | None = None,
        compile: Compile | None = None,
        translation: Translation | None = None,
    ) -> None:
        self._vocab_size = engine.vocab_size
        if translation is not None:
            self._vocab_size, head = translation.vocab_size, translation.target_ids
        if head is not None:
            check_head(head, self._vocab_size)
        self.version = 0
        self._engine, self._chunk, self._compile, self._translation = engine, prefill_chunk, compile, translation
        self._ranker = Ranker(CANDIDATES, self._vocab_size, head)
        self._branches: dict[int, _Branch] = {}

    def open(self, start: Start) -> int:
        """See Drafter.open."""
        tokens = self._begin(start)
        needs = [self._need(tokens), *(self._need(branch.tokens) for branch in self._branches.values())]
        if not self._engine.fits(needs):
            raise DrafterFull(f"no room for {needs[0]} more cached positions beside {len(self._branches)} sessions")
        edit = self._shaper(start)
        sequence = self._engine.open()
        self._branches[sequence] = _Branch(sequence, start.sampling, tokens, len(start.tokens), edit)
        return sequence

    def _begin(self, start: Start) -> list[int]:
        """What the model is fed of a session's committed tokens."""
        if self._translation is None:
            return list(start.tokens)
        prompt = self._translation.prompt(start.tokens[: start.prompt_len])
        tokens = prompt + self._translation.feed(start.tokens[start.prompt_len :])
        if not tokens:
            raise DrafterFull("there is no text yet, and the drafter has no special token to begin with")
        return tokens

    def _feed(self, tokens: Sequence[int]) -> Sequence[int]:
        """What the model is fed of more tokens; one for each that it can guess."""
        return tokens if self._translation is None else self._translation.feed(tokens)

    def _shaper(self, start: Start) -> Shaper | None:
        prompt, output = start.tokens[: start.prompt_len], start.tokens[start.prompt_len :]
        try:
            return shaper_of(start.constraints, prompt, output, self._vocab_size, self._compile)
        except GrammarError as error:
            raise DrafterFull(f"it cannot follow the grammar: {error}") from error

    def _need(self, tokens: Sequence[int]) -> int:
        """Cached positions of a session as it is now, with a whole tree."""
        return min(len(tokens), self._engine.context_length) + RUN_AHEAD

    def close(self, session: int) -> None:
        """See Drafter.close."""
        if self._branches.pop(session, None) is not None:
            self._engine.close(session)

    def reroot(self, session: int, tree: DraftTree, tokens: Sequence[int]) -> None:
        """See Drafter.reroot."""
        branch = self._branches[session]
        branch.tokens += self._feed(tokens)
        branch.length += len(tokens)
        if branch.edit is not None:
            branch.edit.advance(tokens)
        path = tree.follow(tokens)
        evaluated = list(itertools.takewhile(branch.slots.__contains__, path))
        if len(evaluated) == len(tokens):
            self._keep_below(branch, evaluated)
            return
        # The last committed token has not been evaluated, so no guess below it has been either.
        if evaluated:
            self._engine.commit(session, [branch.slots[id] for id in evaluated])
        # A token that the model has nothing for leaves it with what it had: then its last one is fed again.
        self._engine.truncate(session, min(self._engine.length(session), len(branch.tokens) - 1))
        branch.slots, branch.candidates = {}, {}

    def _keep_below(self, branch: _Branch, path: Sequence[int]) -> None:
        renamed = self._engine.commit(branch.sequence, [branch.slots[id] for id in path])
        kept = {id: renamed[slot] for id, slot in branch.slots.items() if slot in renamed}
        root = branch.candidates[path[-1]]
        branch.candidates = {ROOT: root} | {id: branch.candidates[id] for id in kept}
        branch.slots = kept

    def propose(self, asks: Sequence[Ask]) -> list[tuple[Guess, ...] | None]:
        """See Drafter.propose.  One batched forward over all asks whose answer is not known yet.

        What cannot be evaluated, since it lies beyond the model's context or there is no room in the cache, is answered
        with (): its session goes on with what is cached, and is asked again below its next committed token.
        """
        plans: dict[int, _Plan] = {}
        refused: set[int] = set()
        room = _Room(self._engine)
        for number, ask in enumerate(asks):
            branch = self._branches[ask.session]
            if ask.parent not in branch.candidates:
                plan = plans.get(ask.session) or _Plan(branch, self._engine, self._feed, room)
                if plan.want(ask):
                    plans[ask.session] = plan
                else:
                    refused.add(number)
        self._share_out(plans.values())
        self._evaluate([plan for plan in plans.values() if plan.tokens])
        starved = {session for session, plan in plans.items() if plan.starved}
        refused |= {number for number, ask in enumerate(asks) if ask.session in starved}
        return [() if number in refused else self._answer(ask) for number, ask in enumerate(asks)]

    def _share_out(self, plans: Iterable[_Plan]) -> None:
        """What a step may prefill goes to those first who lack the least: who only drafts waits for nobody's prompt."""
        left = self._chunk
        for plan in sorted(plans, key=lambda plan: len(plan.uncached)):
            left -= plan.prefill(left)

    def _evaluate(self, plans: Sequence[_Plan]) -> None:
        if not plans:
            return
        logits = self._engine.step([plan.feed() for plan in plans])
        ranked = self._ranker.rank([plan.rows(rows) for rows, plan in zip(logits, plans, strict=True)])
        for plan, found in zip(plans, ranked, strict=True):
            plan.take(found)

    def _answer(self, ask: Ask) -> tuple[Guess, ...] | None:
        found = self._branches[ask.session].candidates.get(ask.parent)
        return None if found is None else tuple(Guess(token, logq) for token, logq in found[: ask.width])


class _Room:
    """The free blocks of a step, as far as no plan has claimed them."""

    def __init__(self, engine: Engine) -> None:
        self._free, self._size = engine.free_blocks, engine.block_size

    def left(self, spare: int) -> int:
        """How many more slots a sequence could have that has so many to spare in its blocks."""
        return spare + self._free * self._size

    def claim(self, spare: int, count: int) -> int:
        """Take what so many more slots need beyond the spare ones; returns what is to spare afterwards."""
        blocks = max(0, -(-(count - spare) // self._size))
        self._free -= blocks
        return spare + blocks * self._size - count


class _Plan:
    """What one session feeds in one step: a chunk of its uncached committed tokens, or else the nodes asked for.

    translate: see ModelDrafter._feed.
    uncached: the committed tokens that the engine lacks.  tokens: what is fed.  positions: what the rows that come back
    decide, each the index of a token in the whole sequence.  starved: there is no room to feed anything.
    """

    def __init__(self, branch: _Branch, engine: Engine, translate: _Translate, room: _Room) -> None:
        self.branch = branch
        self.uncached = branch.tokens[engine.length(branch.sequence) :]
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.starved = False
        self._engine, self._translate, self._room = engine, translate, room
        self._spare = engine.spare(branch.sequence)
        self._first_slot = engine.pending(branch.sequence)
        self._nodes: dict[int, int] = {}  # id -> slot
        self._parents: list[int] = []
        self._paths: list[tuple[int, ...]] = []

    def want(self, ask: Ask) -> bool:
        """Also evaluate the asked node.  False if that cannot be done before the next re-root."""
        path = ask.tree.path(ask.parent)
        if len(self.branch.tokens) + len(path) > self._engine.context_length:
            return False
        if self.uncached:
            return True
        missing = [id for id in path if id not in self.branch.slots and id not in self._nodes]
        live = self._first_slot + len(self._nodes) + len(missing)
        if live > RUN_AHEAD or len(missing) > self._room.left(self._spare):
            return False
        self._spare = self._room.claim(self._spare, len(missing))
        self._add(ask.tree, path)
        return True

    def _add(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Plan the nodes of a path from the root, as far as they are neither cached nor planned."""
        above = -1
        for depth, id in enumerate(path, start=1):
            known = self.branch.slots.get(id, self._nodes.get(id))
            if known is None:
                known = self._nodes[id] = self._first_slot + len(self.tokens)
                self.tokens += self._translate((tree.nodes[id].token,))
                self._parents.append(above)
                self.positions.append(self.branch.length + depth)
                if self.branch.edit is not None:
                    self._paths.append(tuple(tree.nodes[id].token for id in path[:depth]))
            above = known

    def prefill(self, limit: int) -> int:
        """Feed uncached tokens, at most `limit` of them, as far as there is room, and return how many."""
        room = self._room.left(self._spare)
        self.starved = bool(self.uncached) and not room
        tail = self.uncached[: min(limit, room)]
        self._room.claim(self._spare, len(tail))
        self.tokens += tail
        self._parents += range(-1, len(tail) - 1)
        if tail and len(tail) == len(self.uncached):
            self.positions.append(self.branch.length)
            self._paths.append(())
        return len(tail)

    def feed(self) -> Feed:
        """The engine's part of the plan."""
        count = len(self.tokens)
        rows = range(count - len(self.positions), count)
        return Feed(self.branch.sequence, tuple(self.tokens), tuple(self._parents), tuple(rows))

    def rows(self, logits: Tensor) -> Rows:
        """What the step has brought, ready to be ranked."""
        return Rows(logits, self.branch.sampling, self.positions, self.branch.edit, self._paths)

    def take(self, ranked: Sequence[tuple[Candidate, ...]]) -> None:
        """Note what the step has brought.  ranked: what follows each of the rows."""
        if self.uncached:
            self._engine.commit(self.branch.sequence, range(len(self.tokens)))
        self.branch.slots |= self._nodes
        self.branch.candidates |= zip(self._nodes or (ROOT,), ranked, strict=not self.uncached)
