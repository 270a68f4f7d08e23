"""Schedules: when the drafter grows which node, and when the verifier verifies which nodes.

A schedule is a pair of plain functions over one replicated tree, with no clock and no state of their own:
``grow`` runs in the drafter, ``ripe`` in the verifier.  Neither can change a token, only the time it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.actors.tree import ROOT, DraftTree
from paceline.actors.values import Speculation

MAX_K = 32


@dataclass(frozen=True, slots=True)
class Expand:
    """Ask for `width` children of node `parent` (or ROOT), and for up to `depth` levels where that costs nothing."""

    parent: int
    width: int = 1
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the verifier knows of a session that it could verify now.

    drafting: a live drafter has been heard from, so that waiting can pay.  done: it will grow no more below this base.
    waited: seconds since the session's last pass.  patience: how long a draft may be waited for, in seconds.
    """

    drafting: bool
    done: bool
    waited: float
    patience: float


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
    """grow(tree, speculation) -> nodes to expand next; ripe(mirror, speculation, waiting) -> what to verify now."""

    name: str
    grow: Callable[[DraftTree, Speculation], tuple[Expand, ...]]
    ripe: Callable[[DraftTree, Speculation, Waiting], Verify | Wait]


def _chain(tree: DraftTree, limit: int) -> tuple[int, ...]:
    """The best chain from the root, at most `limit` nodes long: at every node on, the child of highest log q."""
    best: dict[int, int] = {}
    for node in tree.nodes.values():
        rival = best.get(node.parent)
        if rival is None or node.logq > tree.nodes[rival].logq:
            best[node.parent] = node.id
    chain: list[int] = []
    while len(chain) < limit and (chain[-1] if chain else ROOT) in best:
        chain.append(best[chain[-1] if chain else ROOT])
    return tuple(chain)


def _grow_chain(tree: DraftTree, limit: int) -> tuple[Expand, ...]:
    chain = _chain(tree, limit)
    if len(chain) >= limit:
        return ()
    return (Expand(chain[-1] if chain else ROOT, depth=limit - len(chain)),)


def _once_long(chain: tuple[int, ...], enough: int, waiting: Waiting) -> Verify | Wait:
    """Verify `chain` once it is long enough, or once nothing longer is to be hoped for."""
    hopeless = waiting.done or not waiting.drafting or waiting.waited >= waiting.patience
    if len(chain) >= enough or hopeless:
        return Verify(chain)
    return Wait(waiting.patience - waiting.waited)


def _plain_grow(tree: DraftTree, speculation: Speculation) -> tuple[Expand, ...]:
    return ()


def _plain_ripe(mirror: DraftTree, speculation: Speculation, waiting: Waiting) -> Verify | Wait:
    return Verify()


def _sync_grow(tree: DraftTree, speculation: Speculation) -> tuple[Expand, ...]:
    return _grow_chain(tree, speculation.k)


def _sync_ripe(mirror: DraftTree, speculation: Speculation, waiting: Waiting) -> Verify | Wait:
    return _once_long(_chain(mirror, speculation.k), speculation.k, waiting)


def _amusd_grow(tree: DraftTree, speculation: Speculation) -> tuple[Expand, ...]:
    # k tokens may be under verification; as many again may be grown below them meanwhile, and one bonus token.
    return _grow_chain(tree, 2 * speculation.k + 1)


def _amusd_ripe(mirror: DraftTree, speculation: Speculation, waiting: Waiting) -> Verify | Wait:
    return _once_long(_chain(mirror, speculation.k), min(2, speculation.k), waiting)


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        # One token per pass; nothing is drafted.
        Schedule("plain", _plain_grow, _plain_ripe),
        # Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), algorithm 1: a
        # chain of k is drafted while the verifier waits for it, then verified at once.
        Schedule("sync", _sync_grow, _sync_ripe),
        # McDanel, "AMUSD: Asynchronous Multi-Device Speculative Decoding" (2024), section 3: the drafter drafts without
        # pause, one token at a time; the verifier takes whatever is pending, at least two tokens; on a divergence the
        # drafter starts again at the committed prefix.
        Schedule("amusd", _amusd_grow, _amusd_ripe),
    )
}
