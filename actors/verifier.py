"""The verifier's loop: take what came in, choose the sessions that are ripe, verify them in one pass, commit.

It owns the committed prefixes.  Drafts are hints that come over links; whatever a drafter does, late, dead or lying,
costs time at most.  The loop imports no Ray and has no clock of its own: tests run it over in-memory links.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.actors.engine import Engine, Feed
from paceline.actors.inbox import Inbox
from paceline.actors.link import Link, LinkDown, LinkEvent, LinkUp, Received
from paceline.actors.messages import Close, GrowthMessage, Malformed, Message, decode, encode
from paceline.actors.rule import BadLogits, verify
from paceline.actors.schedules import MAX_K, Verify, Waiting
from paceline.actors.session import Limits, Session, TextStream
from paceline.actors.tree import Subtree
from paceline.actors.values import Delta, ErrorCode, Finish, FinishReason, Request, Stats
from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VerifierSettings:
    """max_sessions: how many run at once, others queue.  prefill_chunk: prompt tokens per session and pass.
    max_patience: the longest a draft is ever waited for, in seconds."""

    max_sessions: int = 16
    max_queue: int = 256
    prefill_chunk: int = 512
    max_patience: float = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """A request enters; `emit` is called from the loop's thread with each of its deltas, the last one with a finish."""

    request: Request
    emit: Callable[[Delta], None]


@dataclass(frozen=True, slots=True)
class Cancel:
    """What was submitted shall end now.  If it has ended already, another request of the same id is left alone."""

    submit: Submit


@dataclass(frozen=True, slots=True)
class _Work:
    """What one session brings to a pass: uncached committed tokens, then the nodes to verify below them."""

    session: Session
    tail: tuple[int, ...]
    tree: Subtree
    whole: bool

    def feed(self) -> Feed:
        root = len(self.tail) - 1
        parents = (*range(-1, root), *(root + 1 + parent for parent in self.tree.parents))
        rows = tuple(range(root, root + 1 + len(self.tree.tokens))) if self.whole else ()
        return Feed(self.session.sequence, self.tail + self.tree.tokens, parents, rows)

    def slots(self, path: Sequence[int]) -> tuple[int, ...]:
        return (*range(len(self.tail)), *(len(self.tail) + node for node in path))


@dataclass(slots=True)
class _Patience:
    """How long a drafter's growth takes to arrive, from what was seen of it: a moving mean, in seconds."""

    limit: float
    mean: float | None = None

    def learn(self, waited: float) -> None:
        self.mean = waited if self.mean is None else 0.8 * self.mean + 0.2 * waited

    @property
    def seconds(self) -> float:
        return self.limit if self.mean is None else min(self.limit, 0.02 + 3 * self.mean)


class Verifier:
    """Runs sessions over one engine and any number of links to drafters.

    Everything enters by `inbox`, from any thread; `turn` and `run` belong to one thread.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        text: Callable[[Request], TextStream],
        settings: VerifierSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inbox: Inbox[Submit | Cancel | LinkEvent] = Inbox()
        self.sessions: dict[str, Session] = {}
        self.waiting: deque[Submit] = deque()
        self.counters: Counter[str] = Counter()
        self._engine, self._limits, self._text = engine, limits, text
        self._settings = settings or VerifierSettings()
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._up: dict[str, int] = {}
        self._submits: dict[str, Submit] = {}
        self._slots: list[Session | None] = [None] * self._settings.max_sessions
        self._epochs = itertools.count(1)
        self._patience: dict[str, _Patience] = {}
        self._reserved: dict[str, int] = {}

    def add_link(self, link: Link) -> None:
        """Make a drafter known.  Call before its link delivers anything."""
        self._links[link.name] = link
        self._patience[link.name] = _Patience(self._settings.max_patience)

    def drafters(self) -> tuple[str, ...]:
        """The names of the links that are up.  From any thread."""
        return tuple(self._up.copy())

    def run(self) -> None:
        """Turn until a Shutdown comes in; then end every session."""
        timeout: float | None = None
        try:
            while self.take(timeout):
                timeout = self.turn()
        finally:
            for submit in list(self._submits.values()):
                self._cancel(submit)

    # What comes in

    def take(self, timeout: float | None) -> bool:
        """Handle what has come in; see Inbox.take."""
        return self.inbox.take(timeout, self._handle)

    def _handle(self, event: Submit | Cancel | LinkEvent) -> None:
        match event:
            case Submit():
                self._submit(event)
            case Cancel(submit=submit):
                self._cancel(submit)
            case LinkUp(name=name, generation=generation):
                self._up[name] = generation
                self._patience[name] = _Patience(self._settings.max_patience)
                self._reopen(name)
            case LinkDown(name=name, reason=reason):
                self._lose(name, reason)
            case Received(name=name, generation=generation, data=data):
                if self._up.get(name) == generation:
                    self._receive(name, data)
                else:
                    self.counters["stale_messages"] += 1

    def _submit(self, submit: Submit) -> None:
        request = submit.request
        context = self._limits.context_length
        if request.id in self._submits:
            submit.emit(_refused(request, f"request id {request.id!r} is in use", "internal"))
        elif len(request.prompt) >= context:
            why = f"a prompt of {len(request.prompt)} tokens leaves no room in a context of {context}"
            submit.emit(_refused(request, why, "internal"))
        else:
            self._submits[request.id] = submit
            self.waiting.append(submit)
            self._admit()
            if len(self.waiting) > self._settings.max_queue:
                full = f"the queue is full ({self._settings.max_queue} requests wait); try again later"
                self._refuse(self.waiting.pop(), full, "exhausted")

    def _admit(self) -> None:
        """Start waiting requests, in their order, while slots and blocks last."""
        while self.waiting and None in self._slots:
            request = self.waiting[0].request
            # Blocks for the longest possible course are set aside, so no session can run out of them half-way.
            need = min(len(request.prompt) + request.max_tokens, self._limits.context_length) + MAX_K + 1
            if not self._engine.fits([need, *self._reserved.values()]):
                if self.sessions:
                    return
                why = f"the KV cache cannot hold {need} positions; ask for fewer tokens"
                self._refuse(self.waiting.popleft(), why, "exhausted")
                continue
            submit = self.waiting.popleft()
            try:
                self._start(request, need)
            except Exception as error:
                log.exception("request %s could not be started", request.id)
                self._refuse(submit, str(error) or type(error).__name__, "internal")

    def _refuse(self, submit: Submit, why: str, code: ErrorCode) -> None:
        del self._submits[submit.request.id]
        submit.emit(_refused(submit.request, why, code))

    def _start(self, request: Request, need: int) -> None:
        slot, text = self._slots.index(None), self._text(request)
        # Nothing is taken before the session stands, so there is nothing to give back if it cannot.
        session = Session(request, slot, self._limits, text)
        session.sequence = self._engine.open()
        self._slots[slot] = session
        self.sessions[request.id] = session
        self._reserved[request.id] = need
        self._attach(session)

    def _attach(self, session: Session) -> None:
        """Give a session to the live drafter that has the fewest."""
        if session.schedule.name == "plain" or not self._up:
            return
        load = Counter(other.drafter for other in self.sessions.values())
        self._open(session, min(self._up, key=lambda name: load[name]))

    def _open(self, session: Session, name: str) -> None:
        self._send(name, session.open_message(next(self._epochs), name))

    def _reopen(self, name: str) -> None:
        for session in self.sessions.values():
            if session.drafter in (None, name):
                self._attach(session)

    def _lose(self, name: str, reason: str) -> None:
        log.warning("drafter %s is lost (%s); its sessions go on without it", name, reason)
        self._up.pop(name, None)
        for session in self.sessions.values():
            if session.drafter == name:
                session.detach()
                self._attach(session)

    def _send(self, name: str, message: Message) -> None:
        try:
            sent = self._links[name].send(encode(message))
        except (ValueError, struct.error) as error:
            log.warning("a message to drafter %s cannot be sent: %s", name, error)
            sent = False
        if not sent:
            self.counters["unsent_messages"] += 1

    # Growth

    def _receive(self, name: str, data: bytes) -> None:
        try:
            message = decode(data)
        except Malformed as error:
            self._malformed(name, error)
            return
        if isinstance(message, GrowthMessage):
            self._grow(name, message)
        else:
            self.counters["unexpected_messages"] += 1

    def _malformed(self, name: str, error: Malformed) -> None:
        """A drafter that sends rubbish for a session drafts it no more; the session itself goes on."""
        self.counters["malformed_messages"] += 1
        session = self._slot(error.session) if error.session is not None else None
        if session is not None and session.drafter == name and session.epoch == error.epoch:
            log.warning("drafter %s sent a malformed message (%s)", name, error)
            self._send(name, Close(session.slot, session.epoch))
            session.detach()

    def _slot(self, slot: int) -> Session | None:
        return self._slots[slot] if slot < len(self._slots) else None

    def _grow(self, name: str, message: GrowthMessage) -> None:
        session = self._slot(message.session)
        if session is None or session.drafter != name or session.epoch != message.epoch:
            self.counters["stale_messages"] += 1
            return
        if message.lost:
            self._open(session, name)
            return
        nodes = [node for node in message.nodes if node.token < self._engine.vocab_size]
        growth = session.mirror.grow(nodes, message.base_len)
        session.mirror = growth.tree.cut(8 * MAX_K)
        session.heard = True
        # Growth below an older prefix may hang under a branch that was dropped here; below this one, nothing was.
        session.resync = session.resync or (growth.orphaned > 0 and message.base_len == session.mirror.base_len)
        if message.done:
            session.done_at = message.base_len
        self.counters["out_of_vocabulary_nodes"] += len(message.nodes) - len(nodes)
        for kind in ("added", "repeated", "stale", "orphaned"):
            self.counters[f"{kind}_nodes"] += getattr(growth, kind)

    # The pass

    def turn(self) -> float | None:
        """One pass over the sessions that are ripe.  Returns how long to wait for something to come in, in seconds.

        0: there may be more to do at once.  None: nothing to do until something comes in.
        """
        self._admit()
        now = self._clock()
        work: list[_Work] = []
        waits: list[float] = []
        for session in self.sessions.values():
            chosen = self._choose(session, now)
            if isinstance(chosen, _Work):
                work.append(chosen)
            else:
                waits.append(chosen)
        if work:
            self._pass(work)
            return 0
        return min(waits, default=None)

    def _choose(self, session: Session, now: float) -> _Work | float:
        """The session's part in the next pass, or the seconds it would rather wait."""
        uncached = session.tokens[self._engine.length(session.sequence) :]
        chunk = self._settings.prefill_chunk
        if len(uncached) > chunk:
            return _Work(session, tuple(uncached[:chunk]), Subtree(), whole=False)
        tree = self._ripe(session, now)
        return tree if isinstance(tree, float) else _Work(session, tuple(uncached), tree, whole=True)

    def _ripe(self, session: Session, now: float) -> Subtree | float:
        drafting = session.heard and session.drafter is not None
        if session.ready_at is None:
            session.ready_at = now
        waiting = Waiting(
            drafting=drafting,
            done=session.done_at >= session.mirror.base_len,
            waited=now - session.ready_at,
            patience=self._patience[session.drafter].seconds if session.drafter else 0.0,
        )
        choice = session.schedule.ripe(session.mirror, session.request.speculation, waiting)
        if not isinstance(choice, Verify):
            return max(choice.seconds, 0.001)
        if drafting and session.drafter:
            self._note_wait(session, session.drafter, waiting)
        return session.within(session.mirror.subtree(choice.ids))

    def _note_wait(self, session: Session, drafter: str, waiting: Waiting) -> None:
        """Learn from how long a draft was waited for; one that did not come in time is not waited for again."""
        self._patience[drafter].learn(min(waiting.waited, waiting.patience))
        if waiting.waited >= waiting.patience and not waiting.done and not len(session.mirror):
            self.counters["late_drafts"] += 1
            session.heard = False

    def _pass(self, work: list[_Work]) -> None:
        for item, logits in self._step(work):
            session = item.session
            try:
                self._commit(item, logits)
            except Exception as error:
                self._fail(session, error)

    def _fail(self, session: Session, error: Exception) -> None:
        log.exception("request %s failed", session.request.id)
        code: ErrorCode = "bad_logits" if isinstance(error, BadLogits) else "internal"
        self._cut_short(session, session.finish("error", str(error) or type(error).__name__, code))

    def _step(self, work: list[_Work]) -> Iterable[tuple[_Work, Tensor]]:
        """One forward pass over all of `work`; if it fails, one each, so that the fault finds the request it is of."""
        try:
            return list(zip(work, self._engine.step([item.feed() for item in work]), strict=True))
        except Exception as error:
            if len(work) > 1:
                log.warning("a pass over %d sessions failed (%s); trying each alone", len(work), error)
                return [done for item in work for done in self._step([item])]
            self._fail(work[0].session, error)
            return []

    def _commit(self, item: _Work, logits: Tensor) -> None:
        session = item.session
        if not item.whole:
            self._engine.commit(session.sequence, item.slots(()))
            return
        self.counters["verify_passes"] += 1
        outcome = verify(item.tree, logits, session.request.sampling, len(session.tokens))
        self._engine.commit(session.sequence, item.slots(outcome.path))
        # What is left below the accepted path is not what the target said.
        self._engine.truncate(session.sequence, self._engine.length(session.sequence))
        delta, verdict = session.commit(outcome, len(item.tree.tokens))
        if delta.finish is not None:
            self._end(session, delta)
            return
        if verdict is not None and session.drafter is not None:
            self._send(session.drafter, verdict)
        self._submits[session.request.id].emit(delta)

    # The end

    def _cancel(self, submit: Submit) -> None:
        """End a request if it still runs; a second cancel, or one that comes late, finds nothing to do."""
        request = submit.request
        if self._submits.get(request.id) is not submit:
            return
        session = self.sessions.get(request.id)
        if session is not None:
            self._cut_short(session, session.finish("cancelled"))
        else:
            self.waiting.remove(submit)
            del self._submits[request.id]
            submit.emit(Delta((), "", _before_start(request, "cancelled")))

    def _cut_short(self, session: Session, finish: Finish) -> None:
        """End a session from outside; its ids are out already, so the text held back for them goes out too."""
        self._end(session, Delta((), session.held_text(), finish))

    def _end(self, session: Session, last: Delta) -> None:
        request_id = session.request.id
        assert last.finish is not None
        del self.sessions[request_id], self._reserved[request_id]
        self._slots[session.slot] = None
        self._engine.close(session.sequence)
        if session.drafter is not None:
            self._send(session.drafter, Close(session.slot, session.epoch))
        self.counters[f"finished_{last.finish.reason}"] += 1
        self._submits.pop(request_id).emit(last)

    def check(self) -> None:
        """Raise AssertionError if what is kept about sessions contradicts itself or the engine."""
        assert set(self.sessions) == set(self._reserved), "sessions and reservations differ"
        assert {id(s) for s in self._slots if s} == {id(s) for s in self.sessions.values()}, "slots and sessions differ"
        assert set(self._submits) == set(self.sessions) | {s.request.id for s in self.waiting}, (
            "a stream has no session"
        )
        for session in self.sessions.values():
            session.mirror.check()
            assert session.mirror.base_len == len(session.tokens), f"mirror of {session.request.id} is off its prefix"


def _before_start(request: Request, reason: FinishReason, error: str = "", code: ErrorCode = "") -> Finish:
    stats = Stats(request.speculation.schedule)
    return Finish(reason, len(request.prompt), 0, request.sampling.seed, stats, error, code)


def _refused(request: Request, error: str, code: ErrorCode) -> Delta:
    return Delta((), "", _before_start(request, "error", error, code))
