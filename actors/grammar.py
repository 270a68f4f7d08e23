"""Grammars that a completion has to follow: which tokens may come next, by the library llguidance.

A grammar is compiled wherever it is needed (the gateway checks it, the verifier obeys it, a drafter guesses by it) from
the same text and the target's own tokenizer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PATIENCE = 0.5
"""Seconds that compiling a grammar, and finding out what may come first, may take; a good one takes milliseconds."""

_JSON_DEFAULTS = {"whitespace_pattern": r" |\n {0,16}"}
"""Between tokens of JSON a space, or a new line and its indentation: a model may fill an answer with white space."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or that cannot be followed any further."""


def _limits() -> Any:
    """What a grammar may cost per token: loops that serve many requests follow it.  The library's own are seconds."""
    from llguidance import LLParserLimits

    return LLParserLimits(step_max_items=5000, initial_lexer_fuel=100_000, step_lexer_fuel=20_000)


def from_json_schema(schema: str) -> str:
    """The grammar of the JSON values that a schema allows.  Raises GrammarError."""
    from llguidance import LLMatcher

    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise GrammarError(f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    if parsed is True:
        parsed = {}
    if not isinstance(parsed, dict):
        raise GrammarError("a JSON schema that allows anything is a JSON object, or true")
    try:
        return str(LLMatcher.grammar_from_json_schema(parsed, defaults=_JSON_DEFAULTS))
    except (ValueError, RecursionError) as error:
        raise GrammarError("it is nested too deeply" if isinstance(error, RecursionError) else str(error)) from error


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
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
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
        """Raise GrammarError, with the reason, unless this can be compiled, and followed without delay."""
        started = time.monotonic()
        self.matcher(grammar).allowed((), ())
        if time.monotonic() - started > _PATIENCE:
            raise GrammarError("it is too large: what may come first takes too long to find out; make it simpler")

    def matcher(self, grammar: str) -> Matcher:
        """What follows a completion by this grammar.  Raises GrammarError."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(_plainly(matcher.get_error()))
        return Matcher(matcher, self._tokenizer.vocab_size, self.vocab_size, self._eos_ids)


class Matcher:
    """One completion's place in its grammar: after the committed tokens, and, for a while, after a path below them."""

    def __init__(self, matcher: Any, width: int, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._committed, self._vocab_size = matcher, vocab_size
        self._words = np.zeros((width + 31) // 32, dtype=np.uint32)
        self._eos_ids = [id for id in eos_ids if id < vocab_size]
        self._leave()

    def allowed(self, path: Sequence[int], ends: Sequence[int]) -> NDArray[np.bool_]:
        """Which tokens may come after `path`, bool [vocab_size]; those of `ends` where the text may end there.

        Raises GrammarError where none may, or the path itself breaks the grammar.
        """
        self._walk(path)
        self._there.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        allowed = bits[: self._vocab_size].view(np.bool_)
        allowed[self._eos_ids] = False
        if self._there.is_accepting():
            allowed[list(ends)] = True
        return allowed

    def complete(self, path: Sequence[int]) -> bool:
        """Whether nothing can follow after `path`.  Raises GrammarError if it breaks the grammar."""
        self._walk(path)
        return bool(self._there.is_stopped())

    def advance(self, tokens: Sequence[int]) -> None:
        """These were committed.  Raises GrammarError if they break the grammar."""
        self._walk(tokens)
        self._committed = self._there
        self._leave()

    def _leave(self) -> None:
        """Stand at the committed tokens again.

        By a copy, which costs next to nothing: the library's rollback can leave wrong masks behind, and a matcher that
        has failed stays so.
        """
        self._there, self._path = self._committed.deep_copy(), list[int]()

    def _walk(self, path: Sequence[int]) -> None:
        """From where it stands to this path."""
        if self._there.is_error() or list(path[: len(self._path)]) != self._path:
            self._leave()
        rest = list(path[len(self._path) :])
        # A token that breaks the grammar would break the matcher for good, if it was told to consume it.
        taken = self._there.try_consume_tokens(rest)
        self._path += rest[:taken]
        self._check()
        if taken < len(rest):
            raise GrammarError(f"token {rest[taken]} breaks the grammar")

    def _check(self) -> None:
        if self._there.is_error():
            raise GrammarError(_plainly(self._there.get_error()))


def _plainly(error: str) -> str:
    """The reason in a message of the library, without what it quotes."""
    if "coerce_one_of" in error:
        return "oneOf cannot be held to where two of its schemas may allow the same value; use anyOf"
    lines = error.strip().splitlines() or ["it cannot be followed"]
    reason = next((line for line in lines if line.startswith("error: ")), lines[0])
    return reason.removeprefix("error: ").removeprefix("Parser Error: ")
