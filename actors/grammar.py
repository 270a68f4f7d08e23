"""Grammars that a completion has to follow: which tokens may come next, by the library llguidance.

A grammar is compiled wherever it is needed (the gateway checks it, the verifier obeys it, a drafter guesses by it) from
the same text and the target's own tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or that cannot be followed any further."""


def from_json_schema(schema: str) -> str:
    """The grammar of the JSON values that a schema allows.  Raises GrammarError."""
    from llguidance import LLMatcher

    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise GrammarError(f"it is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise GrammarError("a JSON schema is a JSON object")
    return str(LLMatcher.grammar_from_json_schema(parsed))


def from_regex(regex: str) -> str:
    """The grammar of the texts that a regular expression matches as a whole."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(regex))


def from_ebnf(text: str) -> str:
    """The grammar of an EBNF text, in Lark's or in GBNF's notation.  Raises GrammarError."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(LLMatcher.grammar_from_lark(any_to_lark(text)))
    except Exception as error:  # The converter raises whatever it stumbles over.
        raise GrammarError(f"it cannot be read: {error}") from error


class Grammars:
    """Compiles grammars for one tokenizer.

    tokenizer: of transformers, a fast one.  vocab_size: columns of the logits.  eos_ids: the ids that end a text.
    Raises GrammarError for a tokenizer that llguidance cannot work with.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        from llguidance.hf import from_tokenizer

        self.vocab_size, self._eos_ids = vocab_size, sorted(eos_ids)
        size = max(vocab_size, 1 + max(tokenizer.get_vocab().values()))
        try:
            # It wants some id that ends a text, whatever we make of it; see Matcher.allowed.
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=size, eos_token=self._eos_ids or [size - 1])
        except Exception as error:
            raise GrammarError(f"the target's tokenizer cannot be used with grammars: {error}") from error

    def check(self, grammar: str) -> None:
        """Raise GrammarError, with the place, unless this can be compiled."""
        from llguidance import LLMatcher

        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if failed:
            raise GrammarError(" ".join(str(messages[0]).split()))

    def matcher(self, grammar: str) -> Matcher:
        """What follows a completion by this grammar.  Raises GrammarError."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))
        return Matcher(matcher, self._tokenizer.vocab_size, self.vocab_size, self._eos_ids)


class Matcher:
    """One completion's place in its grammar: after the committed tokens, and, for a while, after a path below them."""

    def __init__(self, matcher: Any, width: int, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._words = np.zeros((width + 31) // 32, dtype=np.uint32)
        self._eos_ids = [id for id in eos_ids if id < vocab_size]
        self._path: list[int] = []

    def allowed(self, path: Sequence[int], ends: Sequence[int]) -> NDArray[np.bool_]:
        """Which tokens may come after `path`, bool [vocab_size]; those of `ends` where the text may end there.

        Raises GrammarError where none may, or the path itself breaks the grammar.
        """
        self._walk(path)
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        allowed = bits[: self._vocab_size].view(np.bool_)
        allowed[self._eos_ids] = False
        if self._matcher.is_accepting():
            allowed[list(ends)] = True
        return allowed

    def complete(self, path: Sequence[int]) -> bool:
        """Whether nothing can follow after `path`."""
        self._walk(path)
        return bool(self._matcher.is_stopped())

    def advance(self, tokens: Sequence[int]) -> None:
        """These were committed.  Raises GrammarError if they break the grammar."""
        self._walk(tokens)
        self._path = []

    def _walk(self, path: Sequence[int]) -> None:
        """From the path where it stands to this one."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        back = len(self._path) - common
        if back:
            self._matcher.rollback(back)
        del self._path[common:]
        rest = list(path[common:])
        # A token that breaks the grammar would break the matcher for good, if it was told to consume it.
        taken = self._matcher.try_consume_tokens(rest)
        self._path += rest[:taken]
        self._check()
        if taken < len(rest):
            raise GrammarError(f"token {rest[taken]} breaks the grammar")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_first_line(self._matcher.get_error()))


def _first_line(error: str) -> str:
    return error.strip().partition("\n")[0]
