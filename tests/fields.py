"""Requests that use every field, and what they must give: an implementation of the sampling contract of its own.

It is written for clarity: one request, one token at a time, everything worked out anew for every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from paceline.actors.grammar import Grammars
from paceline.actors.rule import perturbed
from paceline.actors.values import Constraints, Request
from test_text import write_tokenizer
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

EOS = 1
VOCAB = 330
"""As many as the tokenizer has ids."""


def write_model(directory: Path, blur: float = 0.0, context: int = 128) -> Path:
    """A random Llama that speaks the tokens of test_text's byte-level tokenizer.  blur: noise on its weights."""
    model = tiny_model("llama", vocab_size=VOCAB, eos_token_id=EOS, max_position_embeddings=context)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter += blur * parameter.std() * torch.randn_like(parameter)
        if name == "lm_head.weight":
            # Sure enough of itself for a blurred copy to be right now and then.
            parameter *= 2.5
    model.save_pretrained(directory)
    return write_tokenizer(directory, "byte_level")


def constrained(row: Tensor, constraints: Constraints, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """The logits [V] after the constraints but the grammar, by the words of the API."""
    values: list[float] = row.double().tolist()
    for token, bias in constraints.logit_bias:
        values[token] += bias
    for token in {*prompt, *output}:
        factor = constraints.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= constraints.frequency_penalty * list(output).count(token) + constraints.presence_penalty
    for word in constraints.bad_words:
        if list(word[:-1]) == list(output)[len(output) - len(word) + 1 :]:
            values[word[-1]] = -torch.inf
    if len(output) < constraints.min_tokens:
        for token in constraints.ends:
            values[token] = -torch.inf
    return torch.tensor(values)


def by_grammar(row: Tensor, constraints: Constraints, output: Sequence[int], grammars: Grammars) -> Tensor:
    """The logits without what the grammar does not allow."""
    matcher = grammars.matcher(constraints.grammar)
    matcher.advance(output)
    return row.masked_fill(~torch.from_numpy(matcher.allowed((), constraints.ends)), -torch.inf)


def decoded(directory: Path, request: Request, grammars: Grammars) -> tuple[list[int], list[float], str]:
    """The ids of a request without stop strings, one at a time, their log-probabilities, and why they end."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ends = set(request.stop_token_ids) | (set() if request.ignore_eos else {EOS})
    constraints = replace(request.constraints, ends=tuple(ends))
    output: list[int] = []
    logprobs: list[float] = []
    for token, logprob in _draws(model, request, constraints, output, grammars):
        output.append(token)
        logprobs.append(logprob)
        complete = bool(constraints.grammar) and grammars.matcher(constraints.grammar).complete(output)
        if token in ends or complete:
            return output, logprobs, "stop"
        if len(output) == request.max_tokens:
            return output, logprobs, "length"
    raise AssertionError("draws have no end")


def _draws(
    model: Any, request: Request, constraints: Constraints, output: list[int], grammars: Grammars
) -> Iterator[tuple[int, float]]:
    """The next token after `output`, which grows meanwhile, and its log-probability."""
    while True:
        with torch.no_grad():
            row = model(torch.tensor([[*request.prompt, *output]])).logits[0, -1]
        scores = constrained(row, constraints, request.prompt, output).float()
        if constraints.grammar:
            scores = by_grammar(scores, constraints, output, grammars)
        position = len(request.prompt) + len(output)
        token = int(perturbed(scores, request.sampling, position).argmax())
        yield token, float(row.log_softmax(-1)[token])
