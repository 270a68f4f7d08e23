"""How fast each schedule should be: tokens per second from what a pass, a draft step and the link cost.

All times are seconds.  A session under a schedule is a renewal process: it goes through a few kinds of passes, each
with its chance, its tokens, its nodes and its wait for a draft; the speed is mean tokens over mean time.  The
controller chooses by these numbers, and the benchmark holds what it measured against them.

What is left out: the time a loop takes for itself, prefill, a request's end, and (where several sessions share the
passes) who just misses whose pass, of which the mean is taken.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.actors.schedules import MAX_CHILDREN, MAX_K, MAX_NODES, Plan, fan_out


@dataclass(frozen=True, slots=True)
class Costs:
    """What things cost now, in seconds, and how good the guesses are.

    verify_base, verify_node: a pass over N rows (each session's root and its nodes) takes base + node * N.
    draft: one draft step, over all the leaves that it grows.  latency: the link, one way.
    acceptance: how often the best guess at depth 1, 2, ... is right, given that those above it are; deeper ones are as
    good as the last.  second: how often the next best guess is right, given that the better ones are wrong.
    passes: (rows, seconds) as measured, by rows; where there are any, they and the line between them count instead.
    """

    verify_base: float
    verify_node: float
    draft: float
    latency: float = 0.0
    acceptance: tuple[float, ...] = (0.6,)
    second: float = 0.4
    passes: tuple[tuple[float, float], ...] = ()

    def verify(self, rows: float) -> float:
        """Seconds for a pass over so many rows."""
        last = (0.0, 0.0)
        for known in self.passes:
            if rows <= known[0]:
                if last[0]:
                    return _between(last, known, rows)
                # However steep the line, the smallest pass still streams the weights.
                return max(known[1] - self.verify_node * (known[0] - rows), known[1] / 2)
            last = known
        return last[1] + self.verify_node * (rows - last[0]) if last[0] else self.verify_base + self.verify_node * rows

    def accepts(self, depth: int) -> float:
        """The acceptance at this depth, 1 being the first guess."""
        return self.acceptance[min(depth, len(self.acceptance)) - 1]

    def survives(self, depth: int) -> float:
        """How often a chain of `depth` guesses is right altogether."""
        return math.prod(map(self.accepts, range(1, depth + 1)))

    def covers(self, others: int) -> float:
        """How often the right token is among so many next best guesses, given that the best one is wrong."""
        return 1 - (1 - self.second) ** max(others, 0)


_TINY = 1e-9


def _between(low: tuple[float, float], high: tuple[float, float], x: float) -> float:
    return low[1] + (high[1] - low[1]) * (x - low[0]) / (high[0] - low[0])


class Kind(NamedTuple):
    """One kind of pass.  share: how common it is, among its schedule's.  wait: what the session waits before it."""

    share: float
    tokens: float
    nodes: float
    wait: float = 0.0


def expected_tokens(acceptance: Sequence[float] | float, k: int) -> float:
    """E(alpha, k): tokens that verifying a chain of k yields, the bonus token among them.

    acceptance: one alpha for every depth, or one for each; the last one holds for all deeper ones.
    Leviathan et al. (2023), equation 1: (1 - alpha^(k+1)) / (1 - alpha), which is the case of one alpha.
    """
    alphas = (acceptance,) if isinstance(acceptance, int | float) else tuple(acceptance)
    total = product = 1.0
    for depth in range(k):
        product *= alphas[min(depth, len(alphas) - 1)]
        total += product
    return total


def rate(plan: Plan, costs: Costs, sessions: int = 1) -> float:
    """Tokens per second of `sessions` sessions together, all of them under this plan."""
    return sessions * session_rate(plan, costs, sessions)


def session_rate(plan: Plan, costs: Costs, sessions: int = 1) -> float:
    """Tokens per second of one session that shares its passes with others like it, `sessions` in all."""
    kinds = _KINDS[plan.schedule](plan, costs, sessions)
    return _share_passes(kinds, costs, sessions)


def best_k(costs: Costs, sessions: int = 1, schedule: str = "sync", most: int = MAX_K) -> int:
    """The draft depth at which a schedule is fastest."""
    return max(range(1, most + 1), key=lambda k: rate(Plan(schedule, k), costs, sessions))


def _share_passes(kinds: Sequence[Kind], costs: Costs, sessions: int) -> float:
    """The speed of one session among `sessions` equal ones.

    A session that waits while another one is ready misses whole passes; where all of them wait, they wait together.
    """
    shares = sum(kind.share for kind in kinds)
    tokens, nodes, wait = (sum(kind.share * kind[i] for kind in kinds) / shares for i in (1, 2, 3))

    def shared_pass(others: float) -> float:
        """A pass shared with so many others, whose nodes are the mean; what this one brings bends its time upwards."""
        rows = others * (nodes + 1)
        return sum(kind.share * costs.verify(kind.nodes + 1 + rows) for kind in kinds) / shares

    if sessions == 1:
        return tokens / (shared_pass(0) + wait)
    ready = sum(kind.share for kind in kinds if kind.wait <= 0) / shares
    together = (1 - ready) ** (sessions - 1)
    active = float(sessions)
    for _ in range(4):
        taken = shared_pass(active - 1)
        missed = sum(kind.share * math.ceil(kind.wait / taken) for kind in kinds) / shares * taken
        idle = together * wait + (1 - together) * missed
        active = sessions * (together + (1 - together) * taken / (taken + missed))
    return tokens / (taken + idle)


def _pass_seconds(costs: Costs, sessions: int, nodes: float) -> float:
    return costs.verify(sessions * (nodes + 1))


def _lag(costs: Costs, busy: bool) -> float:
    """From a verdict to the start of the first draft step that knows it, and from that step's end back, in all."""
    return 2 * costs.latency + (costs.draft / 2 if busy else 0.0)


def _steps(costs: Costs, seconds: float) -> int:
    """How many draft steps, and their way here, fit in so much time."""
    return max(0, min(MAX_NODES, math.floor(seconds / max(costs.draft, _TINY) + 1e-6)))


def _plain(plan: Plan, costs: Costs, sessions: int) -> list[Kind]:
    """1 / v."""
    return [Kind(1, 1, 0)]


def _sync(plan: Plan, costs: Costs, sessions: int) -> list[Kind]:
    """E / (v + k c + 2 lambda).  Leviathan et al. (2023), theorem 3.8, with the link."""
    return [Kind(1, expected_tokens(costs.acceptance, plan.k), plan.k, plan.k * costs.draft + _lag(costs, False))]


def _amusd(plan: Plan, costs: Costs, sessions: int) -> list[Kind]:
    """Two kinds of passes.  McDanel (2024) gives the schedule; this is the renewal argument for it.

    Fresh: after a divergence two new tokens are waited for, 2 lambda + 2 c.  Full: what was grown during the last pass
    was right so far, so that up to k tokens are there at once.  Full follows if all is accepted and the bonus token
    was guessed as well.  A pass of v seconds leaves v / c tokens, less the bonus token.
    """
    fresh = min(2, plan.k)
    taken = _pass_seconds(costs, sessions, plan.k)
    full = int(min(plan.k, max(fresh, _steps(costs, taken) - 1)))
    # What is missing of two tokens when the pass ends has to be waited for.
    short = max(0.0, (fresh + 1) * costs.draft - taken)
    busy = (plan.k + 1) * costs.draft > taken
    after_fresh, after_full = costs.survives(fresh + 1), costs.survives(full + 1)
    return [
        Kind(
            1 - after_full,
            expected_tokens(costs.acceptance, fresh),
            fresh,
            fresh * costs.draft + _lag(costs, busy),
        ),
        Kind(after_fresh, expected_tokens(costs.acceptance, full), full, short),
    ]


def _pearl(plan: Plan, costs: Costs, sessions: int) -> list[Kind]:
    """Pre-verify and post-verify passes; chunk = k.

    Liu et al. (2025), section 4 and appendix: there a chunk that was accepted whole yields gamma tokens and no bonus
    token.  Here the target's own draw is always committed: it decides, at the end of a chunk, the first token of the
    next one.  So a pre-verify pass yields one token, and a post-verify pass E(alpha, gamma - 1); it follows a
    pre-verify pass with probability alpha, and another post-verify pass with alpha^gamma.
    """
    nodes = max(1, plan.k - 1)
    first, later = _pass_seconds(costs, sessions, 0), _pass_seconds(costs, sessions, nodes)
    # The chunk is there after so many pre-verify passes that its first token and one more have arrived by then.
    arrived = (n * first - _lag(costs, True) for n in range(1, 9))
    grown = [seconds / max(costs.draft, _TINY) - n for n, seconds in enumerate(arrived, start=1)]
    passes = next((n for n, tokens in enumerate(grown, start=1) if tokens >= 1), None)
    if passes is None:
        return _plain(plan, costs, sessions)
    again, alpha = costs.survives(nodes + 1), costs.accepts(1)
    tokens = expected_tokens(costs.acceptance, nodes)
    missing = max(0.0, nodes - grown[passes - 1]) * costs.draft
    return [
        *(Kind(alpha**n * (1 - again), 1, 0) for n in range(passes)),
        Kind(alpha**passes * (1 - again), tokens, nodes, missing),
        Kind(alpha**passes * again, tokens, nodes, max(0.0, (nodes + 1) * costs.draft - later)),
    ]


class _Next(NamedTuple):
    """With which chance a pass is followed by one over so many nodes; what is lacking is the chance of a miss."""

    chance: float
    nodes: int


def _saguaro(plan: Plan, costs: Costs, sessions: int) -> list[Kind]:
    """A Markov chain over how long the draft is that a pass finds.

    Kumar, Dao and May (2026), theorem 7 in essence: E / (max(v, T + 2 lambda) + (1 - h) miss).  During a pass over n
    tokens the drafter first completes the chain to k, then prepares the outcomes, then continues each of them; how far
    it comes decides how long the next draft is.  A hit needs the outcome among those prepared.  After a miss `fresh`
    tokens are waited for.
    """
    fresh = min(plan.fresh, plan.k)
    following = _saguaro_following(plan, costs, sessions)
    visits, state, misses = [0.0] * (plan.k + 1), {fresh: 1.0}, 0.0
    # The mean over many passes after a miss is that over all of them, since misses come again and again.
    for _ in range(_HORIZON):
        after = {fresh: 0.0}
        for nodes, weight in state.items():
            missed = weight
            for chance, found in following[nodes]:
                after[found] = after.get(found, 0.0) + weight * chance
                missed -= weight * chance
            after[fresh] += missed
            misses += missed
        state = after
        for nodes, weight in state.items():
            visits[nodes] += weight
    lag = fresh * costs.draft + _lag(costs, _saguaro_busy(plan, costs, sessions)) if fresh else 0.0
    tokens = [expected_tokens(costs.acceptance, n) for n in range(plan.k + 1)]
    visits[fresh] -= misses
    drafted = [Kind(share, tokens[n], n) for n, share in enumerate(visits) if share > _TINY]
    return [*drafted, Kind(misses, tokens[fresh], fresh, lag)] if misses > _TINY else drafted


_HORIZON = 20


def _saguaro_busy(plan: Plan, costs: Costs, sessions: int) -> bool:
    """Whether the drafter is in the middle of a step when a verdict comes."""
    needed = (plan.k + 1) * costs.draft + 2 * costs.latency
    return needed > _pass_seconds(costs, sessions, plan.k) * (1 + _TINY)


def _saguaro_following(plan: Plan, costs: Costs, sessions: int) -> list[list[_Next]]:
    """What may follow a pass over the first n tokens of a chain, for n from 0 to k."""
    k = plan.k
    counts = fan_out(costs.accepts(1), k, plan.fanout * (k + 1))
    lag = _lag(costs, _saguaro_busy(plan, costs, sessions))
    following: list[list[_Next]] = []
    # cut: how often the draft is cut before n and the outcome was prepared.  survives: how often all n are right.
    cut, survives = 0.0, 1.0
    for n in range(k + 1):
        taken = _pass_seconds(costs, sessions, n)
        # The chain grows on while the last verdict is under way; what else is prepared depends on that.
        chain = min(k, 2 * k - n, _steps(costs, taken) - 1)
        branch = min(k, _steps(costs, taken - lag) - (k - n) - 1)
        alpha = costs.accepts(n + 1)
        last = survives * (1 - alpha) * costs.covers(counts[n] - (n == k))
        reached = [_Next(survives * alpha, chain)] if chain > 0 and (n < k or counts[k]) else []
        following.append([*reached, _Next(cut + last, branch)] if branch > 0 else reached)
        cut, survives = cut + survives * (1 - alpha) * costs.covers(counts[n]), survives * alpha
    return following


def _swiftspec(plan: Plan, costs: Costs, sessions: int) -> list[Kind]:
    """A Markov chain over how large a tree a pass finds; 0 is a miss, after which `fresh` levels are waited for.

    Zhang et al. (2025), section 3, give no formula.  Approximated: what survives a verdict is taken for a tree that was
    grown from its root until it had as many nodes, and its size is rounded to one of _AGES.  The chance of a node is
    the product of the rates along its path, a pass yields 1 + the sum of the chances of its nodes, and a hit is a node
    that hangs below the verified ones.
    """
    taken = _pass_seconds(costs, sessions, plan.budget)
    # What is grown while a verdict is under way is of use where it went along the outcome, about four tokens of it.
    steps = _steps(costs, taken - 2 * costs.latency * (1 - costs.survives(4)))
    # Rounded, so that estimates which hardly move are not worked out again and again.
    quality = ((_rounded(costs.accepts(1)), _rounded(_deeper(costs))), _rounded(costs.second))
    passes = {0: _tree_pass(*quality, plan.width, plan.budget, plan.fresh, steps)}
    visits, state = dict.fromkeys(_AGES, 0.0), {0: 1.0}
    for _ in range(_HORIZON):
        after: dict[int, float] = {0: 0.0}
        for age, weight in state.items():
            if age not in passes:
                passes[age] = _tree_pass(*quality, plan.width, plan.budget, age, steps)
            after[0] += weight * (1 - sum(passes[age].following.values()))
            for grown, chance in passes[age].following.items():
                after[grown] = after.get(grown, 0.0) + weight * chance
        state = {age: weight for age, weight in after.items() if weight > 1e-3}
        for age, weight in state.items():
            visits[age] += weight
    wait = plan.fresh * costs.draft + _lag(costs, True) if plan.fresh else 0.0
    seen = [(age, visits[age]) for age in passes if visits[age] > 0]
    return [Kind(share, passes[age].tokens, passes[age].nodes, 0.0 if age else wait) for age, share in seen]


def _deeper(costs: Costs) -> float:
    """The acceptance below the first depth: the geometric mean of the next four."""
    return math.prod(map(costs.accepts, range(2, 6))) ** 0.25


def _rounded(share: float) -> float:
    """Rounded to a tenth of a logit: finely where it matters, near 0 and 1."""
    inside = min(max(share, 0.001), 0.999)
    return round(1 / (1 + math.exp(-round(10 * math.log(inside / (1 - inside))) / 10)), 4) if 0 < share < 1 else share


_AGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Sizes of trees, as draft steps that it takes to grow them."""


class _TreePass(NamedTuple):
    """tokens, nodes: of one pass.  following: how often trees of these ages are there already when it ends."""

    tokens: float
    nodes: int
    following: Mapping[int, float]


@functools.lru_cache(maxsize=4096)
def _tree_pass(
    acceptance: tuple[float, ...], second: float, width: int, budget: int, age: int, steps: int
) -> _TreePass:
    """A tree is grown best first for `age` steps, its best `budget` nodes are verified, and it grows `steps` more."""
    tree = _grown_tree(acceptance, second, width)
    verified = set(heapq.nlargest(budget, range(1, tree.size(age)), key=tree.chance.__getitem__))
    tokens = 1 + sum(tree.chance[node] for node in verified)
    ages, inside = tree.ages(tree.size(age + steps)), verified | {0}
    following: dict[int, float] = {}
    for node in range(1, len(ages)):
        if node not in verified and tree.parent[node] in inside and ages[node]:
            grown = min(_AGES, key=lambda known: abs(known - ages[node]))
            following[grown] = following.get(grown, 0.0) + tree.chance[node]
    return _TreePass(tokens, len(verified), following)


@functools.lru_cache(maxsize=64)
def _grown_tree(acceptance: tuple[float, ...], second: float, width: int) -> _GrownTree:
    return _GrownTree(Costs(0, 0, 0, 0, acceptance, second), width)


class _GrownTree:
    """A tree in the mean: for each node how likely it is that the text takes this way.  Node 0 is the root.

    It is grown until it is full, the best `width` leaves by `width` children each in every step.
    """

    def __init__(self, costs: Costs, width: int) -> None:
        self.chance, self.parent, self._depth = [1.0], [-1], [0]
        self._costs, self._width, self._children = costs, width, min(width, MAX_CHILDREN)
        self._leaves = [(-1.0, 0)]
        self._sizes = [1]
        while len(self.chance) <= MAX_NODES:
            for leaf in [heapq.heappop(self._leaves)[1] for _ in range(min(width, len(self._leaves)))]:
                self._expand(leaf)
            self._sizes.append(len(self.chance))

    def size(self, steps: int) -> int:
        """How many nodes there are after so many steps, the root among them; they are the first ones."""
        return self._sizes[min(steps, len(self._sizes) - 1)]

    def ages(self, count: int) -> list[float]:
        """For each of the first `count` nodes, how many steps it would have taken to grow what hangs below it."""
        sizes, depths = [0] * count, [0] * count
        for node in range(count - 1, 0, -1):
            above = self.parent[node]
            sizes[above] += 1 + sizes[node]
            depths[above] = max(depths[above], 1 + depths[node])
        return [max(d, n / (self._width * self._children)) for d, n in zip(depths, sizes, strict=True)]

    def _expand(self, leaf: int) -> None:
        first, second = self._costs.accepts(self._depth[leaf] + 1), self._costs.second
        for rank in range(self._children):
            rate = first if rank == 0 else (1 - first) * second * (1 - second) ** (rank - 1)
            self.chance.append(self.chance[leaf] * rate)
            self.parent.append(leaf)
            self._depth.append(self._depth[leaf] + 1)
            heapq.heappush(self._leaves, (-self.chance[-1], len(self.chance) - 1))


_KINDS: Mapping[str, Callable[[Plan, Costs, int], list[Kind]]] = {
    "plain": _plain,
    "sync": _sync,
    "pearl": _pearl,
    "amusd": _amusd,
    "saguaro": _saguaro,
    "swiftspec": _swiftspec,
}
