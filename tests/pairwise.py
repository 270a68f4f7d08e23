"""Pairwise designs: few rows in which every two levels of any two factors meet at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]
_Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0, tries: int = 20) -> list[Row]:
    """Rows, each with a level of every factor.  Of `tries` random rows the one with most new pairs is taken, again and
    again."""
    rng = random.Random(seed)
    missing = {
        ((one, level), (other, another))
        for one, other in itertools.combinations(factors, 2)
        for level in factors[one]
        for another in factors[other]
    }
    rows: list[Row] = []
    while missing:
        rows.append(
            max((_row(factors, missing, rng) for _ in range(tries)), key=lambda row: len(_pairs(row) & missing))
        )
        missing -= _pairs(rows[-1])
    return rows


def _row(factors: Mapping[str, Sequence[Any]], missing: set[_Pair], rng: random.Random) -> Row:
    """A random row that holds at least one missing pair."""
    fixed = dict(rng.choice(sorted(missing, key=repr)))
    return {name: fixed.get(name, rng.choice(levels)) for name, levels in factors.items()}


def _pairs(row: Row) -> set[_Pair]:
    return set(itertools.combinations(row.items(), 2))
