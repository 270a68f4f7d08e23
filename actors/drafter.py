"""The drafter's loop: take the verdicts that came in, re-root, grow all sessions by one batched step, push at once.

It never waits for a verifier, and it looks at its inbox between any two steps, so a verdict is heard while it drafts.
The loop imports no Ray: tests run it over in-memory links.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.actors.drafters import Ask, Drafter, DrafterFull, Guess
from paceline.actors.inbox import Inbox
from paceline.actors.link import Link, LinkDown, LinkEvent, LinkUp, Received
from paceline.actors.messages import Close, GrowthMessage, Malformed, Open, Verdict, decode, encode
from paceline.actors.schedules import MAX_K, SCHEDULES, Expand, Schedule
from paceline.actors.tree import ROOT, DraftTree, NewNode
from paceline.actors.values import Speculation

log = logging.getLogger(__name__)

_Key = tuple[str, int]  # link, session slot


@dataclass(slots=True)
class _Draft:
    """One session as the drafter sees it.  handle: its id in the Drafter; None where that refused it.

    done: nothing more will be grown below this base.
    """

    key: _Key
    epoch: int
    handle: int | None
    schedule: Schedule
    speculation: Speculation
    tree: DraftTree
    done: bool = False


class DrafterLoop:
    """Grows the trees of all sessions of all its links with one Drafter.

    Everything enters by `inbox`, from any thread; `turn` and `run` belong to one thread.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.inbox: Inbox[LinkEvent] = Inbox()
        self.counters: Counter[str] = Counter()
        self.drafts: dict[_Key, _Draft] = {}
        self._drafter = drafter
        self._links: dict[str, Link] = {}
        self._up: dict[str, int] = {}
        self._ids = itertools.count(1)

    def add_link(self, link: Link) -> None:
        """Make a verifier known.  Call before its link delivers anything."""
        self._links[link.name] = link

    def run(self) -> None:
        """Turn until a Shutdown comes in."""
        busy = False
        while self.take(0 if busy else None):
            busy = self.turn()
        for key in list(self.drafts):
            self._forget(key)

    def take(self, timeout: float | None) -> bool:
        """Handle what has come in; see Inbox.take."""
        return self.inbox.take(timeout, self._handle)

    def turn(self) -> bool:
        """One step for every session that wants to grow.  False if none does until something comes in."""
        asks = [(draft, ask) for draft in self.drafts.values() for ask in self._asks(draft)]
        grown: dict[_Key, list[NewNode]] = {}
        unready: set[_Key] = set()
        for draft, ask, guesses in self._propose(asks):
            if guesses is None:
                unready.add(draft.key)
            else:
                grown.setdefault(draft.key, []).extend(self._name(ask, guesses))
        for key, nodes in grown.items():
            self._push(self.drafts[key], nodes, exhausted=not nodes and key not in unready)
        return bool(asks)

    def _asks(self, draft: _Draft) -> list[Ask]:
        if draft.done or draft.handle is None:
            return []
        wanted: Sequence[Expand] = draft.schedule.grow(draft.tree, draft.speculation)
        draft.done = not wanted
        return [Ask(draft.handle, draft.tree, e.parent, e.width, e.depth) for e in wanted]

    def _propose(self, asks: Sequence[tuple[_Draft, Ask]]) -> list[tuple[_Draft, Ask, tuple[Guess, ...] | None]]:
        """One batched step; if it fails, one each, so that the fault finds the session it is of."""
        if not asks:
            return []
        try:
            answers = self._drafter.propose([ask for _, ask in asks])
        except Exception as error:
            if len(asks) > 1:
                log.warning("a draft step over %d nodes failed (%s); trying each alone", len(asks), error)
                return [done for pair in asks for done in self._propose([pair])]
            self._fail(asks[0][0], error)
            return []
        self.counters["draft_steps"] += 1
        return [(draft, ask, answer) for (draft, ask), answer in zip(asks, answers, strict=True)]

    def _fail(self, draft: _Draft, error: Exception) -> None:
        self.counters["failed_sessions"] += 1
        log.warning("session %s of %s is drafted no more: %s", draft.key[1], draft.key[0], error)
        self._release(draft)
        # Said once, so that the verifier does not wait for what will not come.
        draft.done = True
        self._send_growth(draft, ())

    def _name(self, ask: Ask, guesses: Sequence[Guess]) -> list[NewNode]:
        ids = [next(self._ids) for _ in guesses]
        above = (ids[guess.parent] if guess.parent >= 0 else ask.parent for guess in guesses)
        return [NewNode(id, parent, g.token, g.logq) for id, parent, g in zip(ids, above, guesses, strict=True)]

    def _push(self, draft: _Draft, nodes: Sequence[NewNode], exhausted: bool) -> None:
        draft.tree = draft.tree.grow(nodes, draft.tree.base_len).tree
        draft.done = exhausted or not draft.schedule.grow(draft.tree, draft.speculation)
        self.counters["grown_nodes"] += len(nodes)
        self._send_growth(draft, nodes)

    def _send_growth(self, draft: _Draft, nodes: Sequence[NewNode]) -> None:
        name, slot = draft.key
        version, base_len = self._drafter.version, draft.tree.base_len
        self._send(name, GrowthMessage(slot, draft.epoch, base_len, version, tuple(nodes), draft.done))

    def _send(self, name: str, message: GrowthMessage) -> None:
        if not self._links[name].send(encode(message)):
            self.counters["unsent_messages"] += 1

    # What comes in

    def _handle(self, event: LinkEvent) -> None:
        match event:
            case LinkUp(name=name, generation=generation):
                self._up[name] = generation
                self._forget_all(name)
            case LinkDown(name=name, reason=reason):
                log.info("the link %s is down (%s)", name, reason)
                self._up.pop(name, None)
                self._forget_all(name)
            case Received(name=name, generation=generation, data=data):
                if self._up.get(name) == generation:
                    self._receive(name, data)
                else:
                    self.counters["stale_messages"] += 1

    def _forget_all(self, name: str) -> None:
        for key in [key for key in self.drafts if key[0] == name]:
            self._forget(key)

    def _forget(self, key: _Key) -> None:
        draft = self.drafts.pop(key, None)
        if draft is not None:
            self._release(draft)

    def _release(self, draft: _Draft) -> None:
        if draft.handle is not None:
            self._drafter.close(draft.handle)
            draft.handle = None

    def _receive(self, name: str, data: bytes) -> None:
        try:
            message = decode(data)
        except Malformed as error:
            self.counters["malformed_messages"] += 1
            log.warning("a malformed message came over %s: %s", name, error)
            if error.session is not None and self._epoch_of((name, error.session)) == error.epoch:
                self._forget((name, error.session))
            return
        match message:
            case Open():
                self._open(name, message)
            case Verdict():
                self._verdict(name, message)
            case Close():
                if self._epoch_of((name, message.session)) == message.epoch:
                    self._forget((name, message.session))
            case GrowthMessage():
                self.counters["unexpected_messages"] += 1

    def _epoch_of(self, key: _Key) -> int | None:
        draft = self.drafts.get(key)
        return draft.epoch if draft else None

    def _open(self, name: str, message: Open) -> None:
        key = (name, message.session)
        known = self._epoch_of(key)
        if known is not None and message.epoch <= known:
            self.counters["stale_messages"] += 1
            return
        self._forget(key)
        schedule = SCHEDULES.get(message.speculation.schedule)
        if schedule is None or not 1 <= message.speculation.k <= MAX_K:
            log.warning("%s over %s is not understood", message.speculation, name)
            self.counters["failed_sessions"] += 1
            return
        handle = self._admit(message)
        tree = DraftTree(message.base_len)
        self.drafts[key] = _Draft(key, message.epoch, handle, schedule, message.speculation, tree)

    def _admit(self, message: Open) -> int | None:
        try:
            return self._drafter.open(message.tokens, message.sampling, message.max_tokens)
        except DrafterFull as error:
            log.info("session %d goes undrafted: %s", message.session, error)
            self.counters["refused_sessions"] += 1
            return None

    def _verdict(self, name: str, message: Verdict) -> None:
        key = (name, message.session)
        draft = self.drafts.get(key)
        if draft is None or draft.epoch < message.epoch:
            # Its Open never arrived, or its session was dropped here: ask for a new one.
            self._lose(name, message)
        elif draft.epoch > message.epoch or message.base_len < draft.tree.base_len:
            self.counters["stale_messages"] += 1
        elif message.base_len > draft.tree.base_len:
            self._lose(name, message)
        else:
            self._reroot(draft, message)

    def _lose(self, name: str, message: Verdict) -> None:
        self.counters["lost_sessions"] += 1
        self._forget((name, message.session))
        version = self._drafter.version
        self._send(name, GrowthMessage(message.session, message.epoch, message.base_len, version, lost=True))

    def _reroot(self, draft: _Draft, message: Verdict) -> None:
        if draft.handle is not None:
            try:
                self._drafter.reroot(draft.handle, draft.tree, message.tokens)
            except Exception as error:
                self._fail(draft, error)
            draft.done = False
        draft.tree = draft.tree.reroot(message.tokens)
        if message.resync and draft.handle is not None:
            self._send_growth(draft, [NewNode(n.id, n.parent, n.token, n.logq) for n in draft.tree.nodes.values()])

    def check(self) -> None:
        """Raise AssertionError if what is kept about sessions contradicts itself."""
        for key, draft in self.drafts.items():
            assert draft.key == key, f"draft {draft.key} is filed under {key}"
            draft.tree.check()
            assert all(node.parent in draft.tree.nodes or node.parent == ROOT for node in draft.tree.nodes.values())
