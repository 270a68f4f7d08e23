"""The schedules: what a drafter grows next, and when the verifier verifies which nodes.

A schedule is a pair of plain functions over one replicated tree, with no clock and no state of their own:
``grow`` runs in the drafter, ``ripe`` in the verifier.  Neither can change a token, only the time it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from paceline.actors.tree import ROOT, DraftTree
from paceline.actors.values import Speculation

MAX_K = 32
MAX_FANOUT = 8
MAX_WIDTH = 16
MAX_BUDGET = 64

MAX_NODES = 256
"""Live guesses per session, on both sides: what bounds how far a drafter runs ahead."""

MAX_LEAVES = 32
"""Leaves of one session that may grow in one step."""

MAX_CHILDREN = 8
"""Children of one node, at most."""

AUTO = "auto"
"""The name of the schedule that is none: the controller picks one of the others."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a session is speculated now: one of SCHEDULES, and its numbers; see Speculation.

    acceptance: how likely the first guess of a position is right, as it is estimated now, between 0 and 1.
    fresh: after a miss, how many tokens of a fresh draft are worth waiting for; 0 if a one-token pass is better.
    """

    schedule: str
    k: int = 4
    fanout: int = 3
    width: int = 4
    budget: int = 12
    acceptance: float = 0.5
    fresh: int = 2

    def up_to(self, max_k: int | None) -> Plan:
        """The same with drafts no deeper than this; None is no bound."""
        return self if max_k is None or self.k <= max_k else replace(self, k=max_k)

    def within_limits(self) -> bool:
        """Whether a drafter could follow it."""
        numbers = ((self.k, MAX_K), (self.fanout, MAX_FANOUT), (self.width, MAX_WIDTH), (self.budget, MAX_BUDGET))
        known = self.schedule in SCHEDULES and all(1 <= number <= most for number, most in numbers)
        return known and 0 <= self.acceptance <= 1 and 0 <= self.fresh <= MAX_K


def plan_of(speculation: Speculation) -> Plan:
    """What a request asks for, before anything was measured; `auto` begins as an asynchronous chain.

    Raises ValueError for a schedule that does not exist.
    """
    name = "amusd" if speculation.schedule == AUTO else speculation.schedule
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}, only {', '.join((*SCHEDULES, AUTO))}")
    plan = Plan(name, speculation.k, speculation.fanout, speculation.width, speculation.budget)
    return plan.up_to(speculation.max_k)


@dataclass(frozen=True, slots=True)
class Expand:
    """Ask for `width` children of node `parent` (or ROOT), and for up to `depth` levels where that costs nothing."""

    parent: int
    width: int = 1
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the verifier knows of a session that it could verify now.

    drafting: a live drafter has been heard from, so that waiting can pay.  done: none will grow more below this base.
    waited: seconds since it could be verified.  patience: how long a draft may be waited for, in seconds.
    guessed: the outcome of the last pass had been guessed.  hit: and a draft below it was there already.
    """

    drafting: bool
    done: bool
    waited: float
    patience: float
    guessed: bool = False
    hit: bool = False

    @property
    def hopeless(self) -> bool:
        """Nothing more is to be waited for."""
        return self.done or not self.drafting or self.waited >= self.patience


@dataclass(frozen=True, slots=True)
class Verify:
    """Verify these nodes now; none means plain decoding of one token."""

    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is worth a pass yet; ask again when growth arrives, or in `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """grow(tree, plan) -> nodes to expand next, the most urgent first; ripe(mirror, plan, waiting) -> what to verify.

    No node is asked for twice at the same width below one prefix: what it did not answer, it will not.
    """

    name: str
    grow: Callable[[DraftTree, Plan], tuple[Expand, ...]]
    ripe: Callable[[DraftTree, Plan, Waiting], Verify | Wait]


def _best_children(tree: DraftTree) -> dict[int, int]:
    """Node id (or ROOT) -> its child of highest log q."""
    best: dict[int, int] = {}
    for node in tree.nodes.values():
        rival = best.get(node.parent)
        if rival is None or node.logq > tree.nodes[rival].logq:
            best[node.parent] = node.id
    return best


def _descend(best: Mapping[int, int], start: int, limit: int) -> tuple[int, ...]:
    """The chain of best children below `start`, at most `limit` nodes long."""
    chain: list[int] = []
    at = start
    while len(chain) < limit and at in best:
        at = best[at]
        chain.append(at)
    return tuple(chain)


def _chain(tree: DraftTree, limit: int) -> tuple[int, ...]:
    """The best chain from the root, at most `limit` nodes long."""
    return _descend(_best_children(tree), ROOT, limit)


def _grow_chain(tree: DraftTree, limit: int) -> tuple[Expand, ...]:
    chain = _chain(tree, limit)
    if len(chain) >= limit:
        return ()
    return (Expand(chain[-1] if chain else ROOT, depth=limit - len(chain)),)


def _once_long(ids: tuple[int, ...], length: int, enough: int, waiting: Waiting) -> Verify | Wait:
    """Verify `ids`, a guess `length` tokens long, once that is long enough or nothing more is to be hoped for."""
    if length >= enough or waiting.hopeless:
        return Verify(ids)
    return Wait(waiting.patience - waiting.waited)


def _plain_grow(tree: DraftTree, plan: Plan) -> tuple[Expand, ...]:
    return ()


def _plain_ripe(mirror: DraftTree, plan: Plan, waiting: Waiting) -> Verify | Wait:
    return Verify()


def _sync_grow(tree: DraftTree, plan: Plan) -> tuple[Expand, ...]:
    return _grow_chain(tree, plan.k)


def _sync_ripe(mirror: DraftTree, plan: Plan, waiting: Waiting) -> Verify | Wait:
    chain = _chain(mirror, plan.k)
    return _once_long(chain, len(chain), plan.k, waiting)


def _endless_grow(tree: DraftTree, plan: Plan) -> tuple[Expand, ...]:
    # k tokens may be under verification; as many again may be grown below them meanwhile, and one bonus token.
    return _grow_chain(tree, 2 * plan.k + 1)


def _amusd_ripe(mirror: DraftTree, plan: Plan, waiting: Waiting) -> Verify | Wait:
    chain = _chain(mirror, plan.k)
    return _once_long(chain, len(chain), min(2, plan.k), waiting)


def _pearl_ripe(mirror: DraftTree, plan: Plan, waiting: Waiting) -> Verify | Wait:
    chain = _chain(mirror, plan.k)
    if waiting.guessed:
        # Post-verify.  The bonus token was the chunk's first one, and the rest of it is what is pending.
        return _once_long(chain, len(chain), max(1, plan.k - 1), waiting)
    # Pre-verify: the chunk's first token is checked while the chunk still grows.
    return Verify(chain if len(chain) == plan.k else ())


def fan_out(acceptance: float, k: int, total: int, power: float = 1.0) -> tuple[int, ...]:
    """How many other outcomes to prepare at each of the k + 1 positions of a draft: `total` in all, about.

    The draft is cut at position j < k with probability a^j (1 - a), and accepted whole with a^k.  If F guesses miss
    the outcome with a probability that falls as F^-power, the best split of a budget is proportional to the
    position's probability to the 1 / (1 + power): geometric in j, and capped at the last position.
    Kumar, Dao and May, "Speculative Speculative Decoding" (2026), section 4, the capped geometric fan-out.
    """
    a = min(max(acceptance, 0.01), 0.99)
    shares = [(a**j * (1 - a)) ** (1 / (1 + power)) for j in range(k)] + [a ** (k / (1 + power))]
    scale = total / sum(shares)
    return tuple(min(MAX_CHILDREN, round(scale * share)) for share in shares)


def _saguaro_grow(tree: DraftTree, plan: Plan) -> tuple[Expand, ...]:
    best = _best_children(tree)
    chain = _descend(best, ROOT, plan.k)
    if len(chain) < plan.k:
        # Nothing comes before the draft that the verifier takes next.
        return (Expand(chain[-1] if chain else ROOT, depth=plan.k - len(chain)),)
    if len(tree) >= MAX_NODES:
        return ()
    counts = fan_out(plan.acceptance, plan.k, plan.fanout * (plan.k + 1))
    outcomes: dict[int, list[int]] = {}
    for node in tree.nodes.values():
        outcomes.setdefault(node.parent, []).append(node.id)
    wanted: list[tuple[float, Expand]] = []
    for at, own, count in zip((ROOT, *chain), (*chain, None), counts, strict=True):
        others = [id for id in outcomes.get(at, ()) if id != own]
        score = tree.nodes[at].score if at != ROOT else 0.0
        if len(others) < count:
            wanted.append((score, Expand(at, width=min(MAX_CHILDREN, count + (own is not None)))))
        wanted += [grown for id in others if (grown := _continue(tree, best, id, plan.k))]
    wanted.sort(key=lambda pair: -pair[0])
    return tuple(expand for _, expand in wanted[:MAX_LEAVES])


def _continue(tree: DraftTree, best: Mapping[int, int], outcome: int, k: int) -> tuple[float, Expand] | None:
    """What a prepared outcome still lacks of its k tokens, and its urgency."""
    below = _descend(best, outcome, k)
    if len(below) >= k:
        return None
    return tree.nodes[outcome].score, Expand(below[-1] if below else outcome, depth=k - len(below))


def _saguaro_ripe(mirror: DraftTree, plan: Plan, waiting: Waiting) -> Verify | Wait:
    chain = _chain(mirror, plan.k)
    enough = 0 if waiting.hit else min(plan.fresh, plan.k)
    return _once_long(chain, len(chain), enough, waiting)


def _swiftspec_grow(tree: DraftTree, plan: Plan) -> tuple[Expand, ...]:
    if len(tree) >= MAX_NODES:
        return ()
    if not tree.nodes:
        return (Expand(ROOT, width=min(plan.width, MAX_CHILDREN)),)
    parents = {node.parent for node in tree.nodes.values()}
    leaves = [node for node in tree.nodes.values() if node.id not in parents and node.depth < MAX_K]
    leaves.sort(key=lambda node: (-node.score, node.depth))
    return tuple(Expand(leaf.id, width=min(plan.width, MAX_CHILDREN)) for leaf in leaves[: plan.width])


def _swiftspec_ripe(mirror: DraftTree, plan: Plan, waiting: Waiting) -> Verify | Wait:
    best = tuple(mirror.cut(plan.budget).nodes)
    enough = 1 if waiting.hit else plan.fresh
    return _once_long(best, mirror.depth, enough, waiting)


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        # One token per pass; nothing is drafted.
        Schedule("plain", _plain_grow, _plain_ripe),
        # Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), algorithm 1: a
        # chain of k is drafted while the verifier waits for it, then verified at once.
        Schedule("sync", _sync_grow, _sync_ripe),
        # Liu et al., "PEARL: Parallel Speculative Decoding with Adaptive Draft Length" (ICLR 2025), section 4: after a
        # rejection the first token of the next chunk is verified while that chunk is drafted (pre-verify, 4.1); while
        # chunks are accepted, one is verified and the next one drafted (post-verify, 4.2).  A chunk is as long as a
        # pass takes (4.3): the verifier sets k of the plan so.
        Schedule("pearl", _endless_grow, _pearl_ripe),
        # McDanel, "AMUSD: Asynchronous Multi-Device Speculative Decoding" (2024), section 3: the drafter drafts without
        # pause, one token at a time; the verifier takes whatever is pending, at least two tokens; on a divergence the
        # drafter starts again at the committed prefix.
        Schedule("amusd", _endless_grow, _amusd_ripe),
        # Kumar, Dao and May, "Speculative Speculative Decoding" (2026), section 4 (Saguaro): while a draft is verified,
        # the drafter prepares a draft for each of the likeliest outcomes; if one of them comes (a hit), its draft is
        # verified at once.  After a miss the session goes on by a one-token pass or a short fresh draft.
        Schedule("saguaro", _saguaro_grow, _saguaro_ripe),
        # Zhang et al., "SwiftSpec: Ultra-Low Latency LLM Decoding by Scaling Asynchronous Speculative Decoding" (2025),
        # sections 3.1 and 3.2: the draft tree grows best first, w leaves per step, through every verification; the
        # verifier takes the best subtree of B nodes, and what survives a verdict keeps its cache.
        Schedule("swiftspec", _swiftspec_grow, _swiftspec_ripe),
    )
}
