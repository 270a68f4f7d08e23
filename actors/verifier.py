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
from dataclasses import dataclass, replace

from paceline.actors.batching import Budget, Share, Want, room_for_more, share_out
from paceline.actors.constraints import Compile, DeadEnd
from paceline.actors.controller import Controller, levels
from paceline.actors.engine import Engine, Feed
from paceline.actors.grammar import GrammarError
from paceline.actors.inbox import Inbox, Peers
from paceline.actors.link import Link, LinkDown, LinkEvent, LinkUp, Received
from paceline.actors.messages import Close, GrowthMessage, Malformed, Message, Verdict, decode, encode
from paceline.actors.rule import BadLogits, verify
from paceline.actors.schedules import SCHEDULES, Verify, Waiting
from paceline.actors.session import MAX_FEEDERS, Feeder, Limits, Session, TextStream
from paceline.actors.trace import VERDICT, VERIFY, Tracer
from paceline.actors.tree import Subtree
from paceline.actors.values import Delta, ErrorCode, Finish, FinishReason, Request, Stats
from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VerifierSettings:
    """max_sessions: how many run at once, others queue.  pass_tokens: tokens per pass, over all sessions.
    prefill_chunk: prompt tokens per pass, over all sessions, while some session decodes; it bounds how much a prompt
    lengthens the others' passes.  max_patience: the longest a draft is ever waited for, in seconds.
    drafters_per_session: how many model drafters grow one session together; retrieval drafters come on top."""

    max_sessions: int = 16
    max_queue: int = 256
    pass_tokens: int = 512
    prefill_chunk: int = 32
    max_patience: float = 2.0
    drafters_per_session: int = 1


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
    """What one session brings to a pass: uncached committed tokens, then the nodes to verify below them.

    waited: seconds that it has waited for a draft before.
    """

    session: Session
    tail: tuple[int, ...]
    tree: Subtree
    whole: bool = True
    waited: float = 0.0

    def want(self, spare: int) -> Want:
        return Want(len(self.tail), len(self.tree.tokens), spare, self.session.served)

    def within(self, share: Share) -> _Work:
        """The part of it that a pass has room for."""
        whole = share.tokens == len(self.tail)
        tree = self.session.best(self.tree, share.nodes)
        return replace(self, tail=self.tail[: share.tokens], tree=tree, whole=whole)

    def feed(self) -> Feed:
        root = len(self.tail) - 1
        parents = (*range(-1, root), *(root + 1 + parent for parent in self.tree.parents))
        # Where the prompt's own log-probabilities are wanted, every token of it is looked at.
        first = 0 if self.session.unread else root if self.whole else len(self.tail)
        rows = tuple(range(first, len(self.tail) + len(self.tree.tokens)))
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

    def fail(self) -> None:
        """Nothing came in time: what was learned, from a faster link or a shorter draft, is too little."""
        if self.mean is not None:
            self.mean = min(self.limit, 2 * max(self.mean, 0.01))

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
        tracer: Tracer | None = None,
        compile: Compile | None = None,
    ) -> None:
        self.inbox: Inbox[Submit | Cancel | LinkEvent] = Inbox()
        self.sessions: dict[str, Session] = {}
        self.waiting: deque[Submit] = deque()
        self.counters: Counter[str] = Counter()
        self.controller = Controller()
        self._engine, self._limits, self._text, self._compile = engine, limits, text, compile
        self._settings = settings or VerifierSettings()
        self._clock = clock
        self._tracer = tracer or Tracer("verifier")
        self._links: dict[str, Link] = {}
        self._retrieval: set[str] = set()
        self._peers = Peers()
        self._submits: dict[str, Submit] = {}
        self._slots: list[Session | None] = [None] * self._settings.max_sessions
        self._epochs = itertools.count(1)
        self._patience: dict[str, _Patience] = {}
        self._budget = Budget(self._settings.pass_tokens, self._settings.prefill_chunk)
        self._passes = itertools.count(1)
        self._paused: dict[str, Session] = {}

    def add_link(self, link: Link, retrieval: bool = False) -> None:
        """Make a drafter known.  Call before its link delivers anything.

        retrieval: it costs nothing, so it grows every session, beside the others.
        """
        if len(self._links) == MAX_FEEDERS:
            raise ValueError(f"a verifier has at most {MAX_FEEDERS} drafters")
        self._links[link.name] = link
        if retrieval:
            self._retrieval.add(link.name)
        self._patience[link.name] = _Patience(self._settings.max_patience)

    def drafters(self) -> tuple[str, ...]:
        """The names of the links that are up.  From any thread."""
        return tuple(self._peers)

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
            case LinkUp(name=name):
                self._peers.up(event)
                self._patience[name] = _Patience(self._settings.max_patience)
                self._reattach(name)
            case LinkDown(name=name, reason=reason):
                self._peers.down(event)
                log.warning("drafter %s is lost (%s); its sessions go on without it", name, reason)
                self._reattach(name)
            case Received() if self._peers.sent(event):
                self._receive(event)
            case Received():
                self.counters["stale_messages"] += 1

    def _submit(self, submit: Submit) -> None:
        request = submit.request
        why = self._unfit(request)
        if request.id in self._submits:
            submit.emit(_refused(request, f"request id {request.id!r} is in use", "internal"))
        elif why:
            submit.emit(_refused(request, *why))
        else:
            self._submits[request.id] = submit
            self.waiting.append(submit)
            self._admit()
            if len(self.waiting) - len(self._paused) > self._settings.max_queue:
                full = f"the queue is full ({self._settings.max_queue} requests wait); try again later"
                self._refuse(self.waiting.pop(), full, "exhausted")

    def _unfit(self, request: Request) -> tuple[str, ErrorCode] | None:
        """Why a request could not even run alone."""
        count, context = len(request.prompt), self._limits.context_length
        if count >= context:
            return f"a prompt of {count} tokens leaves no room in a context of {context}", "internal"
        if not all(0 <= token < self._engine.vocab_size for token in request.prompt):
            return f"a token of the prompt is outside the vocabulary of {self._engine.vocab_size}", "internal"
        need = min(count + request.max_tokens, context)
        if not self._engine.fits([need]):
            return f"the KV cache cannot hold {need} positions; ask for fewer tokens", "exhausted"
        return None

    def _admit(self) -> None:
        """Start waiting requests, in their order, while slots last and there is room for what they need now."""
        while self.waiting and None in self._slots and self._has_room(self.waiting[0].request):
            submit = self.waiting.popleft()
            try:
                self._start(submit.request)
            except GrammarError as error:
                self._refuse(submit, f"response_format: {error}", "invalid")
            except Exception as error:
                log.exception("request %s could not be started", submit.request.id)
                self._refuse(submit, str(error) or type(error).__name__, "internal")

    def _has_room(self, request: Request) -> bool:
        if not self.sessions:
            return True
        engine = self._engine
        owed = [self._uncached(s) - engine.spare(s.sequence) for s in self.sessions.values()]
        paused = self._paused.get(request.id)
        unread = paused.unread if paused else request.prompt_logprobs is not None
        cost = engine.cost(paused.tokens if paused else request.prompt, _salt(request, unread))
        return cost <= room_for_more(engine.free_blocks, owed, engine.block_size)

    def _refuse(self, submit: Submit, why: str, code: ErrorCode) -> None:
        del self._submits[submit.request.id]
        submit.emit(_refused(submit.request, why, code))

    def _start(self, request: Request) -> None:
        """Begin a request, or go on with a paused one."""
        slot = self._slots.index(None)
        # Nothing is taken before the session stands, so there is nothing to give back if it cannot.
        session = self._paused.pop(request.id, None) or self._session(request, slot)
        session.slot = slot
        self._take_sequence(session)
        self._slots[slot] = session
        self.sessions[request.id] = session
        cached = self._engine.length(session.sequence)
        self.counters["cached_tokens"] += cached
        self.counters["prefix_hits"] += cached > 0
        session.follows = not session.unread and self._leader(session) is not None
        self._attach(session)

    def _leader(self, session: Session) -> Session | None:
        """Who reads the prompt of this session already, and will leave its blocks to be found."""
        request = session.request
        for other in self.sessions.values():
            if other is session:
                break
            same = other.request.prompt == request.prompt and other.request.tenant == request.tenant
            if same and not other.follows and not other.unread and self._uncached(other) > 1:
                return other
        return None

    def _waits_for_leader(self, session: Session) -> bool:
        """Whether a session lets another one read its prompt; once that has been done it begins with what was read."""
        if not session.follows:
            return False
        if self._leader(session) is not None:
            return True
        session.follows = False
        self._engine.close(session.sequence)
        self._take_sequence(session)
        return False

    def _take_sequence(self, session: Session) -> None:
        session.sequence = self._engine.open(session.tokens, _salt(session.request, session.unread))

    def _session(self, request: Request, slot: int) -> Session:
        return Session(request, slot, self._limits, self._text(request), self._compile)

    def _attach(self, session: Session) -> None:
        """Give a session the drafters that it lacks: those that cost nothing, and the model drafters with least to do.

        Only a session that never drafts has none.
        """
        if session.request.speculation.schedule == "plain":
            return
        load = Counter(name for other in self.sessions.values() for name in other.feeders)
        models = sorted(set(self._peers) - self._retrieval, key=lambda name: (load[name], name))
        lacking = self._settings.drafters_per_session - len(session.feeders.keys() - self._retrieval)
        free = [name for name in models if name not in session.feeders][: max(lacking, 0)]
        lookups = sorted(self._retrieval & set(self._peers) - session.feeders.keys())
        self._replan(session, {*session.feeders, *free, *lookups})
        for name in (*free, *lookups):
            self._open(session, name)

    def _open(self, session: Session, name: str) -> None:
        self._send(name, session.attach(name, next(self._epochs)))

    def _replan(self, session: Session, feeders: Iterable[str]) -> None:
        lane, request = self._lane(feeders), session.request
        session.plan = self.controller.plan(session.slot, request.speculation, len(self.sessions), lane)

    def _lane(self, feeders: Iterable[str]) -> str:
        """The name for what these drafters guess together."""
        return "+".join(sorted(feeders))

    def _detach(self, session: Session, name: str) -> None:
        """Tell a drafter that it is not wanted any more."""
        feeder = session.feeders.get(name)
        if feeder is not None:
            self._send(name, Close(session.slot, feeder.epoch))
            session.drop(name)

    def _reattach(self, name: str) -> None:
        """A link has come up or gone down: what was attached to it before is void."""
        for session in self.sessions.values():
            session.drop(name)
            self._attach(session)
        if name in self._peers and name not in self._retrieval:
            self._relieve(name)

    def _relieve(self, idle: str) -> None:
        """Give a drafter that has come its share of the sessions that run already."""
        for session in self.sessions.values():
            load = Counter(name for other in self.sessions.values() for name in other.feeders)
            busiest = max(session.feeders.keys() - self._retrieval, key=lambda name: load[name], default=idle)
            if idle not in session.feeders and load[busiest] > load[idle] + 1:
                self._detach(session, busiest)
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

    def _receive(self, event: Received) -> None:
        try:
            message = decode(event.data)
        except Malformed as error:
            self._malformed(event.name, error)
            return
        if isinstance(message, GrowthMessage):
            self._grow(event, message)
        else:
            self.counters["unexpected_messages"] += 1

    def _malformed(self, name: str, error: Malformed) -> None:
        """A drafter that sends rubbish for a session drafts it no more; the session itself goes on."""
        self.counters["malformed_messages"] += 1
        session = self._slot(error.session) if error.session is not None else None
        feeder = session.feeders.get(name) if session is not None else None
        if session is not None and feeder is not None and feeder.epoch == error.epoch:
            log.warning("drafter %s sent a malformed message (%s)", name, error)
            self._detach(session, name)

    def _slot(self, slot: int) -> Session | None:
        return self._slots[slot] if slot < len(self._slots) else None

    def _grow(self, event: Received, message: GrowthMessage) -> None:
        session = self._slot(message.session)
        feeder = session.feeders.get(event.name) if session is not None else None
        if session is None or feeder is None or feeder.epoch != message.epoch:
            self.counters["stale_messages"] += 1
            return
        if message.lost:
            self._open(session, event.name)
            return
        self._note_growth(session, event, message)
        growth = session.grow(feeder, message, self._engine.vocab_size)
        self.counters["out_of_vocabulary_nodes"] += sum(n.token >= self._engine.vocab_size for n in message.nodes)
        for kind in ("added", "repeated", "stale", "orphaned"):
            self.counters[f"{kind}_nodes"] += getattr(growth, kind)

    def _note_growth(self, session: Session, event: Received, message: GrowthMessage) -> None:
        """What it says about the costs of the drafter and its link."""
        lane = self._lane(session.feeders)
        if event.name not in self._retrieval or session.feeders.keys() <= self._retrieval:
            self.controller.note_growth(lane, message.step)
        if session.verdict_at and message.base_len == session.mirror.base_len:
            arrived = self._clock() if event.at is None else event.at
            self.controller.note_latency(lane, (arrived - session.verdict_at - message.age) / 2)

    # The pass

    def turn(self) -> float | None:
        """One pass over the sessions that are ripe.  Returns how long to wait for something to come in, in seconds.

        0: there may be more to do at once.  None: nothing to do until something comes in.
        """
        self._admit()
        work, waits = self._ready()
        work = self._fit(work)
        if work:
            self._pass(work)
            return 0
        return min(waits, default=None)

    def _uncached(self, session: Session) -> int:
        """Committed tokens that are not in the cache: one of a session that decodes, more while it reads its prompt."""
        return len(session.tokens) - self._engine.length(session.sequence)

    def _ready(self) -> tuple[list[_Work], list[float]]:
        """What the sessions would bring to a pass, the oldest first, and the seconds that others would rather wait."""
        now = self._clock()
        prompts: list[Session] = []
        decoding: list[Session] = []
        for session in self.sessions.values():
            if not self._waits_for_leader(session):
                (decoding if self._uncached(session) == 1 else prompts).append(session)
        work = {s.slot: _Work(s, tuple(s.tokens[-self._uncached(s) :]), Subtree()) for s in prompts}
        waits: list[float] = []
        seats = self._budget.decoders(bool(prompts))
        for session in sorted(decoding, key=lambda session: session.served):
            if not seats:
                break
            ripe = self._ripe(session, now)
            if isinstance(ripe, float):
                waits.append(ripe)
                continue
            tree, waited = ripe
            work[session.slot] = _Work(session, (session.tokens[-1],), tree, waited=waited)
            seats -= 1
        return [work[s.slot] for s in self.sessions.values() if s.slot in work], waits

    def _fit(self, work: list[_Work]) -> list[_Work]:
        """What of it fits into one pass.  While there are no blocks for it, the youngest session is paused."""
        engine = self._engine
        decodes = any(self._uncached(session) == 1 for session in self.sessions.values())
        budget = self._budget if decodes else self._budget.alone()
        while True:
            wants = [item.want(engine.spare(item.session.sequence)) for item in work]
            shares = share_out(wants, budget, engine.free_blocks, engine.block_size)
            if shares is not None:
                break
            youngest = next(reversed(self.sessions.values()))
            self._pause(youngest)
            work = [item for item in work if item.session is not youngest]
        self.counters["spared_nodes"] += sum(w.nodes - s.nodes for w, s in zip(wants, shares, strict=True))
        return [item.within(share) for item, share in zip(work, shares, strict=True) if share.tokens]

    def _pause(self, session: Session) -> None:
        """Take a session's blocks; it will read its tokens again, and go on, before anything younger begins."""
        # Alone it fits, see _unfit, so the oldest one always gets on.
        assert len(self.sessions) > 1, f"request {session.request.id} does not fit alone"
        log.debug("request %s pauses: the cache has no blocks left", session.request.id)
        self._withdraw(session)
        session.stand_still()
        self._paused[session.request.id] = session
        self.waiting.appendleft(self._submits[session.request.id])
        self.counters["preemptions"] += 1

    def _ripe(self, session: Session, now: float) -> tuple[Subtree, float] | float:
        """What to verify now, and how long a draft was waited for; or the seconds to wait."""
        if session.ready_at is None:
            session.be_ready(now)
            if session.verdict_at:
                self._tracer.mark("hit" if session.hit else "miss", now, session=session.slot)
        assert session.ready_at is not None
        growing = session.growing()
        waiting = Waiting(
            drafting=session.drafting,
            done=not growing,
            waited=now - session.ready_at,
            patience=max((self._patience[feeder.name].seconds for feeder in growing), default=0.0),
            hit=session.hit,
            guessed=session.guessed,
        )
        choice = SCHEDULES[session.plan.schedule].ripe(session.mirror, session.plan, waiting)
        if not isinstance(choice, Verify):
            return max(choice.seconds, 0.001)
        if session.plan.schedule != "plain":
            self._note_wait(session, growing, waiting)
        return session.within(session.mirror.subtree(choice.ids)), waiting.waited if session.drafting else 0.0

    def _note_wait(self, session: Session, growing: list[Feeder], waiting: Waiting) -> None:
        """Learn from how long a draft was waited for; who did not send any in time is not waited for again."""
        expired = bool(growing) and waiting.waited >= waiting.patience
        late = expired and not len(session.mirror)
        self.counters["late_drafts"] += late
        for feeder in session.feeders.values():
            # A draft that was there already says nothing about how long one takes.
            if feeder.heard and waiting.waited > 0:
                patience = self._patience[feeder.name]
                if expired and feeder in growing:
                    patience.fail()
                else:
                    patience.learn(waiting.waited)
        for feeder in growing:
            feeder.heard = not late

    def _pass(self, work: list[_Work]) -> None:
        number = next(self._passes)
        started, before = self._clock(), self.counters.copy()
        for item in work:
            item.session.served = number
        for item, logits in self._step(work):
            session = item.session
            try:
                self._commit(item, logits)
            except Exception as error:
                self._fail(session, error)
        ended, done = self._clock(), self.counters - before
        nodes = sum(len(item.tree.tokens) for item in work)
        # Tokens of prompts; the last one of a whole tail is the root that every pass has.
        prompt = sum(len(item.tail) - item.whole for item in work)
        if not prompt:
            self.controller.note_pass(ended - started, len(work) + nodes)
        self._tracer.record(
            VERIFY,
            started,
            ended,
            sessions=len(work),
            nodes=nodes,
            prompt=prompt,
            accepted=done["accepted_nodes"],
            tokens=done["committed_tokens"],
        )

    def _fail(self, session: Session, error: Exception) -> None:
        code: ErrorCode = "bad_logits" if isinstance(error, BadLogits) else "internal"
        if isinstance(error, DeadEnd | GrammarError):
            code = "invalid"
            log.info("request %s asks for what cannot be: %s", session.request.id, error)
        else:
            log.error("request %s failed", session.request.id, exc_info=error)
            # If it is its cache that is broken, then nobody else shall begin with it.
            self._engine.forget(session.sequence)
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
        if session.unread:
            session.read(self._engine.length(session.sequence), logits[: len(item.tail)])
            logits = logits[len(item.tail) - item.whole :]
        if not item.whole:
            self._engine.commit(session.sequence, item.slots(()))
            return
        self.counters["verify_passes"] += 1
        outcome = verify(item.tree, logits, session.request.sampling, len(session.tokens), session.edit)
        if outcome.fault is not None and not outcome.tokens:
            raise outcome.fault
        seen = levels(session.mirror, item.tree, outcome.path)
        delta = session.commit(outcome, item.tree, logits, item.waited)
        # What lies behind the end was never committed, and what is left below the path is not what the target said.
        self._engine.commit(session.sequence, item.slots(outcome.path[: len(delta.token_ids)]))
        self._engine.truncate(session.sequence, self._engine.length(session.sequence))
        self.counters["committed_tokens"] += len(delta.token_ids)
        self.counters[f"verdicts_{session.plan.schedule}"] += 1
        self.counters["accepted_nodes"] += min(len(outcome.path), len(delta.token_ids))
        if delta.finish is not None:
            self._end(session, delta)
            return
        now = self._clock()
        elapsed = now - session.verdict_at if session.verdict_at else 0.0
        self.controller.note_verdict(session.slot, seen, len(delta.token_ids), elapsed)
        self._replan(session, session.feeders)
        session.verdict_at = now
        for feeder, verdict in session.verdicts(delta.token_ids):
            self._send(feeder.name, verdict)
            self._trace_verdict(feeder, verdict)
        self._submits[session.request.id].emit(delta)
        if outcome.fault is not None:
            raise outcome.fault

    def _trace_verdict(self, feeder: Feeder, verdict: Verdict) -> None:
        which = {"session": verdict.session, "epoch": verdict.epoch, "base_len": verdict.base_len}
        self._tracer.mark(VERDICT, self._clock(), to=feeder.name, **which)

    # The end

    def _cancel(self, submit: Submit) -> None:
        """End a request if it still runs; a second cancel, or one that comes late, finds nothing to do."""
        request = submit.request
        if self._submits.get(request.id) is not submit:
            return
        session = self.sessions.get(request.id)
        if session is not None:
            self._cut_short(session, session.finish("cancelled"))
            return
        self.waiting.remove(submit)
        paused = self._paused.pop(request.id, None)
        if paused is not None:
            self._say_end(request, Delta((), paused.held_text(), paused.finish("cancelled")))
        else:
            self._say_end(request, Delta((), "", _before_start(request, "cancelled")))

    def _cut_short(self, session: Session, finish: Finish) -> None:
        """End a session from outside; its ids are out already, so the text held back for them goes out too."""
        self._end(session, Delta((), session.held_text(), finish))

    def _end(self, session: Session, last: Delta) -> None:
        self._withdraw(session)
        self._say_end(session.request, last)

    def _withdraw(self, session: Session) -> None:
        """Take a session out of the passes, with its blocks, its slot and its drafters."""
        del self.sessions[session.request.id]
        self._slots[session.slot] = None
        self.controller.forget(session.slot)
        self._engine.close(session.sequence)
        for name in tuple(session.feeders):
            self._detach(session, name)

    def _say_end(self, request: Request, last: Delta) -> None:
        assert last.finish is not None
        self.counters[f"finished_{last.finish.reason}"] += 1
        self._submits.pop(request.id).emit(last)

    def check(self) -> None:
        """Raise AssertionError if what is kept about sessions contradicts itself or the engine."""
        assert {id(s) for s in self._slots if s} == {id(s) for s in self.sessions.values()}, "slots and sessions differ"
        waiting = [submit.request.id for submit in self.waiting]
        assert sorted(self._submits) == sorted([*self.sessions, *waiting]), "a stream has no session"
        assert waiting[: len(self._paused)] == list(reversed(self._paused)), (
            "a paused session is not first in the queue"
        )
        for session in self.sessions.values():
            session.mirror.check()
            assert session.mirror.base_len == len(session.tokens), f"mirror of {session.request.id} is off its prefix"
            assert self._uncached(session) > 0, f"{session.request.id} has nothing left to feed"


def _salt(request: Request, unread: bool) -> bytes | None:
    """Whose cached tokens it may begin with.  unread: none, since it wants to see all of its prompt go by."""
    return None if unread else request.tenant.encode()


def _before_start(request: Request, reason: FinishReason, error: str = "", code: ErrorCode = "") -> Finish:
    stats = Stats(request.speculation.schedule)
    return Finish(reason, len(request.prompt), 0, request.sampling.seed, stats, error, code)


def _refused(request: Request, error: str, code: ErrorCode) -> Delta:
    return Delta((), "", _before_start(request, "error", error, code))
