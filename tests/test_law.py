"""The law of what comes out, with each processor switched on: exact probabilities of all sequences over a tiny
vocabulary, against many seeds, with drafts that are right, wrong and coupled to the noise."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fields import constrained
from paceline.actors.constraints import Shaper
from paceline.actors.rule import Edit, perturbed, verify
from paceline.actors.tree import Subtree
from paceline.actors.values import Constraints, Sampling
from test_rule import chi_square, limit
from torch import Tensor

VOCAB, DEPTH = 4, 3
PROMPT = (0, 2)
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
GUESSED = TABLE + 0.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(6))

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "temperature": ({"temperature": 0.6}, {}),
    "top-k": ({"top_k": 2}, {}),
    "top-p": ({"top_p": 0.7}, {}),
    "min-p": ({"min_p": 0.3}, {}),
    "bias": ({}, {"logit_bias": ((1, 1.5), (3, -1.0))}),
    "repetition": ({}, {"repetition_penalty": 2.0}),
    "frequency": ({}, {"frequency_penalty": 1.0}),
    "presence": ({}, {"presence_penalty": -1.0}),
    "bad words": ({}, {"bad_words": ((1, 2), (3,))}),
    "min tokens": ({}, {"min_tokens": 2, "ends": (0, 3)}),
    "grammar": ({}, {"grammar": "no letter twice in a row"}),
    "all": (
        {"temperature": 0.8, "top_k": 3, "top_p": 0.95, "min_p": 0.02},
        {
            "logit_bias": ((2, 0.5),),
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.4,
            "presence_penalty": 0.3,
            "bad_words": ((0, 1),),
            "min_tokens": DEPTH,
            "ends": (3,),
            "grammar": "no letter twice in a row",
        },
    ),
}


class NoRepeat:
    """A grammar of one rule, in place of a compiled one: no token follows itself."""

    def __init__(self, grammar: str) -> None:
        self.last: int | None = None

    def allowed(self, path: Sequence[int], ends: Sequence[int]) -> Any:
        last = path[-1] if path else self.last
        return (torch.arange(VOCAB) != (-1 if last is None else last)).numpy()

    def complete(self, path: Sequence[int]) -> bool:
        return False

    def advance(self, tokens: Sequence[int]) -> None:
        self.last = tokens[-1] if tokens else self.last


def probabilities(row: Tensor, sampling: Sampling) -> Tensor:
    """What a token is drawn by, from logits, step by step as the API says it."""
    values = (row / sampling.temperature).softmax(-1).tolist()
    order = sorted(range(VOCAB), key=lambda token: -values[token])
    if sampling.top_k:
        values = [value if token in order[: sampling.top_k] else 0.0 for token, value in enumerate(values)]
        values = [value / sum(values) for value in values]
    kept, mass = [], 0.0
    for token in order:
        if mass < sampling.top_p or not kept:
            kept.append(token)
        mass += values[token]
    values = [value if token in kept else 0.0 for token, value in enumerate(values)]
    values = [value if value >= sampling.min_p * max(values) else 0.0 for value in values]
    return torch.tensor(values) / sum(values)


def law(sampling: Sampling, constraints: Constraints) -> Tensor:
    """The probability of every sequence of DEPTH tokens, [VOCAB ** DEPTH]."""
    found = []
    for sequence in itertools.product(range(VOCAB), repeat=DEPTH):
        share = 1.0
        for count, token in enumerate(sequence):
            output = sequence[:count]
            row = constrained(TABLE[(*PROMPT, *output)[-1]], constraints, PROMPT, output)
            if constraints.grammar and output:
                row[output[-1]] = -torch.inf
            share *= float(probabilities(row, sampling)[token])
        found.append(share)
    return torch.tensor(found)


class Shaped:
    """The logits after every path, edited by a Shaper that has come there by commits and by drafts; each made once."""

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints
        self._known: dict[tuple[object, ...], Tensor] = {}

    def edit(self, output: tuple[int, ...]) -> Edit:
        def edited(row: Tensor, path: tuple[int, ...]) -> Tensor:
            key = (output, path, *row.tolist())
            if key not in self._known:
                shaper = Shaper(self._constraints, PROMPT, (), VOCAB, NoRepeat)  # type: ignore[arg-type]
                shaper.advance(output)
                self._known[key] = shaper(row, path)
            return self._known[key]

        return edited


def guesses(kind: str, sampling: Sampling, shaped: Shaped) -> tuple[int, ...]:
    """A chain of guesses after the prompt."""
    path: tuple[int, ...] = ()
    while len(path) < DEPTH:
        row = shaped.edit(())((TABLE if kind == "right" else GUESSED)[(*PROMPT, *path)[-1]], path)
        best = int(perturbed(row, sampling, len(PROMPT) + len(path)).argmax())
        path += ((best + 1) % VOCAB if kind == "wrong" else best,)
    return path


def said(kind: str, sampling: Sampling, shaped: Shaped) -> tuple[tuple[int, ...], int]:
    """DEPTH tokens after the prompt, by passes over what is left of a draft, and how many of them were drafted."""
    chain, output, accepted = guesses(kind, sampling, shaped), (), 0
    while len(output) < DEPTH:
        tail = chain[len(output) :] if chain[: len(output)] == output else ()
        tree = Subtree(tail, tuple(range(-1, len(tail) - 1)), tuple(range(1, len(tail) + 1)))
        rows = TABLE[[(*PROMPT, *output)[-1], *tail]]
        outcome = verify(tree, rows, sampling, len(PROMPT) + len(output), shaped.edit(output))
        assert outcome.fault is None
        output += outcome.tokens
        accepted += len(outcome.path)
    return output[:DEPTH], accepted


@pytest.mark.parametrize("seeds", [400, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_the_law_is_the_processed_targets_whatever_is_guessed(case: str, seeds: int) -> None:
    sampled, constrain = CASES[case]
    options = {"temperature": 1.0, **sampled}
    constraints = Constraints(**constrain)
    expected, shaped = law(Sampling(**options), constraints), Shaped(constraints)
    assert math.isclose(float(expected.sum()), 1, abs_tol=1e-5)
    counts, drafts = torch.zeros(VOCAB**DEPTH), Counter[str]()
    for seed in range(seeds):
        answers = {kind: said(kind, Sampling(**options, seed=seed), shaped) for kind in ("coupled", "right", "wrong")}
        (tokens,) = {tokens for tokens, _ in answers.values()}
        counts[int("".join(map(str, tokens)), VOCAB)] += 1
        drafts += Counter({kind: accepted for kind, (_, accepted) in answers.items()})
    assert counts[expected == 0].sum() == 0, "what cannot come has come"
    likely = expected * seeds >= 5
    # The rare ones together.
    observed = torch.cat([counts[likely], counts[~likely].sum()[None]])
    share = torch.cat([expected[likely], expected[~likely].sum()[None]])
    assert chi_square(observed, share) < limit(max(1, int((share > 0).sum()) - 1))
    assert drafts["right"] == DEPTH * seeds
    assert 0 < drafts["coupled"] < DEPTH * seeds
