"""The drafter's loop: take the verdicts that came in, re-root, grow all sessions by one batched step, push at once.

It never waits for a verifier, and it looks at its inbox between any two steps, so a verdict is heard while it drafts.
The loop imports no Ray: tests run it over in-memory links.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.actors.drafters import Ask, Drafter, DrafterFull, Guess, Start
from paceline.actors.inbox import Inbox, Peers
from paceline.actors.link import Link, LinkDown, LinkEvent, LinkUp, Received
from paceline.actors.messages import Close, GrowthMessage, Malformed, Open, Verdict, decode, encode
from paceline.actors.schedules import SCHEDULES, Expand, Plan
from paceline.actors.trace import DRAFT, VERDICT, Tracer
from paceline.actors.tree import ROOT, DraftTree, NewNode

log = logging.getLogger(__name__)

_Key = tuple[str, int]  # link, session slot


@dataclass(slots=True)
class _Draft:
    """One session as the drafter sees it.

    handle: its id in the Drafter; None where that refused it, or failed.  asked: the width that each node has been
    expanded to below this prefix.  wanted: what to expand next, None where it has to be asked anew.  told: the
    verifier knows that nothing more will come for this prefix.  heard_at: when this prefix became known.
    """

    key: _Key
    epoch: int
    handle: int | None
    plan: Plan
    tree: DraftTree
    heard_at: float
    asked: dict[int, int] = field(default_factory=dict)
    wanted: tuple[Expand, ...] | None = None
    told: bool = False
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def wants(self) -> tuple[Expand, ...]:
        """What to expand next, by the schedule."""
        if self.handle is None:
            return ()
        if self.wanted is None:
            grow = SCHEDULES[self.plan.schedule].grow
            self.wanted = tuple(e for e in grow(self.tree, self.plan) if self.asked.get(e.parent, 0) < e.width)
        return self.wanted

    def grow(self, nodes: Sequence[NewNode]) -> None:
        """Add what was guessed."""
        self.tree = self.tree.grow(nodes, self.tree.base_len).tree
        self.wanted = None

    def reroot(self, tokens: Sequence[int], plan: Plan, heard_at: float) -> None:
        """`tokens` were committed; go on by `plan`."""
        self.tree = self.tree.reroot(tokens)
        self.plan, self.heard_at = plan, heard_at
        # A longer prefix may answer what a shorter one could not.
        self.asked, self.wanted, self.told = {}, None, False

    def name(self, ask: Ask, guesses: Sequence[Guess]) -> list[NewNode]:
        """The guesses that are new, with ids."""
        ids: list[int] = []
        new: list[NewNode] = []
        for guess in guesses:
            parent = ids[guess.parent] if guess.parent >= 0 else ask.parent
            known = self.tree.children.get((parent, guess.token))
            if known is None:
                known = next(self.ids)
                new.append(NewNode(known, parent, guess.token, guess.logq))
            ids.append(known)
        return new


@dataclass(slots=True)
class _StepTime:
    """How long a step takes: a moving mean, in seconds; 0 before the first one."""

    mean: float = 0.0

    def learn(self, seconds: float) -> None:
        self.mean = seconds if self.mean == 0 else 0.9 * self.mean + 0.1 * seconds


class DrafterLoop:
    """Grows the trees of all sessions of all its links with one Drafter.

    Everything enters by `inbox`, from any thread; `turn` and `run` belong to one thread.
    """

    def __init__(
        self, drafter: Drafter, clock: Callable[[], float] = time.monotonic, tracer: Tracer | None = None
    ) -> None:
        self.inbox: Inbox[LinkEvent] = Inbox()
        self.counters: Counter[str] = Counter()
        self.drafts: dict[_Key, _Draft] = {}
        self._drafter = drafter
        self._clock = clock
        self._tracer = tracer or Tracer("drafter")
        self._links: dict[str, Link] = {}
        self._peers = Peers()
        self._step_time = _StepTime()

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
        for draft, ask, guesses in self._propose(asks):
            if guesses is not None:
                draft.asked[ask.parent] = ask.width
                grown.setdefault(draft.key, []).extend(draft.name(ask, guesses))
        for key, nodes in grown.items():
            self.drafts[key].grow(nodes)
            self.counters["grown_nodes"] += len(nodes)
        for draft in self.drafts.values():
            self._push(draft, grown.get(draft.key, ()))
        return bool(asks)

    def _asks(self, draft: _Draft) -> list[Ask]:
        if draft.handle is None:
            return []
        return [Ask(draft.handle, draft.tree, e.parent, e.width, e.depth) for e in draft.wants()]

    def _propose(self, asks: Sequence[tuple[_Draft, Ask]]) -> list[tuple[_Draft, Ask, tuple[Guess, ...] | None]]:
        """One batched step; if it fails, one each, so that the fault finds the session it is of."""
        if not asks:
            return []
        started = self._clock()
        try:
            answers = self._drafter.propose([ask for _, ask in asks])
        except Exception as error:
            if len(asks) > 1:
                log.warning("a draft step over %d nodes failed (%s); trying each alone", len(asks), error)
                return [done for pair in asks for done in self._propose([pair])]
            self._fail(asks[0][0], error)
            return []
        self.counters["draft_steps"] += 1
        ended = self._clock()
        self._step_time.learn(ended - started)
        self._tracer.record(DRAFT, started, ended, sessions=len({draft.key for draft, _ in asks}), leaves=len(asks))
        return [(draft, ask, answer) for (draft, ask), answer in zip(asks, answers, strict=True)]

    def _fail(self, draft: _Draft, error: Exception) -> None:
        self.counters["failed_sessions"] += 1
        log.warning("session %s of %s is drafted no more: %s", draft.key[1], draft.key[0], error)
        self._release(draft)

    def _push(self, draft: _Draft, nodes: Sequence[NewNode]) -> None:
        """Send what is new; and once, that there is nothing more to come, so that nobody waits for it."""
        done = not draft.wants()
        if nodes or (done and not draft.told and draft.plan.schedule != "plain"):
            draft.told = done
            self._send_growth(draft, nodes)

    def _send_growth(self, draft: _Draft, nodes: Sequence[NewNode]) -> None:
        name, slot = draft.key
        message = GrowthMessage(
            slot,
            draft.epoch,
            draft.tree.base_len,
            self._drafter.version,
            tuple(nodes),
            done=draft.told,
            step=self._step_time.mean,
            age=self._clock() - draft.heard_at,
        )
        self._send(name, message)

    def _send(self, name: str, message: GrowthMessage) -> None:
        if not self._links[name].send(encode(message)):
            self.counters["unsent_messages"] += 1

    # What comes in

    def _handle(self, event: LinkEvent) -> None:
        match event:
            case LinkUp(name=name):
                self._peers.up(event)
                self._forget_all(name)
            case LinkDown(name=name, reason=reason):
                log.info("the link %s is down (%s)", name, reason)
                self._peers.down(event)
                self._forget_all(name)
            case Received() if self._peers.sent(event):
                self._receive(event)
            case Received():
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

    def _receive(self, event: Received) -> None:
        name = event.name
        try:
            message = decode(event.data)
        except Malformed as error:
            self.counters["malformed_messages"] += 1
            log.warning("a malformed message came over %s: %s", name, error)
            if error.session is not None and self._epoch_of((name, error.session)) == error.epoch:
                self._forget((name, error.session))
            return
        # What the wait for a running step takes is not the link's fault.
        arrived = self._clock() if event.at is None else event.at
        match message:
            case Open():
                self._open(name, message, arrived)
            case Verdict():
                self._verdict(name, message, arrived)
            case Close():
                if self._epoch_of((name, message.session)) == message.epoch:
                    self._forget((name, message.session))
            case GrowthMessage():
                self.counters["unexpected_messages"] += 1

    def _epoch_of(self, key: _Key) -> int | None:
        draft = self.drafts.get(key)
        return draft.epoch if draft else None

    def _open(self, name: str, message: Open, arrived: float) -> None:
        key = (name, message.session)
        known = self._epoch_of(key)
        if known is not None and message.epoch <= known:
            self.counters["stale_messages"] += 1
            return
        self._forget(key)
        handle = self._admit(message)
        tree = DraftTree(message.base_len)
        self.drafts[key] = _Draft(key, message.epoch, handle, message.plan, tree, arrived)

    def _admit(self, message: Open) -> int | None:
        try:
            return self._drafter.open(Start(message.tokens, message.sampling, message.prompt_len, message.constraints))
        except DrafterFull as error:
            log.info("session %d goes undrafted: %s", message.session, error)
        except Exception as error:
            log.warning("session %d goes undrafted: %s", message.session, error, exc_info=True)
        self.counters["refused_sessions"] += 1
        return None

    def _verdict(self, name: str, message: Verdict, arrived: float) -> None:
        key = (name, message.session)
        which = {"session": message.session, "epoch": message.epoch, "base_len": message.base_len}
        self._tracer.mark(VERDICT, self._clock(), of=name, **which)
        draft = self.drafts.get(key)
        if draft is None or draft.epoch < message.epoch:
            # Its Open never arrived, or its session was dropped here: ask for a new one.
            self._lose(name, message)
        elif draft.epoch > message.epoch or message.base_len < draft.tree.base_len:
            self.counters["stale_messages"] += 1
        elif message.base_len > draft.tree.base_len:
            self._lose(name, message)
        else:
            self._reroot(draft, message, arrived)

    def _lose(self, name: str, message: Verdict) -> None:
        self.counters["lost_sessions"] += 1
        self._forget((name, message.session))
        version = self._drafter.version
        self._send(name, GrowthMessage(message.session, message.epoch, message.base_len, version, lost=True))

    def _reroot(self, draft: _Draft, message: Verdict, arrived: float) -> None:
        if draft.handle is not None:
            try:
                self._drafter.reroot(draft.handle, draft.tree, message.tokens)
            except Exception as error:
                self._fail(draft, error)
        draft.reroot(message.tokens, message.plan, arrived)
        if message.resync:
            self._send_growth(draft, [NewNode(n.id, n.parent, n.token, n.logq) for n in draft.tree.nodes.values()])

    def check(self) -> None:
        """Raise AssertionError if what is kept about sessions contradicts itself."""
        for key, draft in self.drafts.items():
            assert draft.key == key, f"draft {draft.key} is filed under {key}"
            draft.tree.check()
            assert all(node.parent in draft.tree.nodes or node.parent == ROOT for node in draft.tree.nodes.values())
