"""What a request does to the logits, at any path: every edge of it; tests/test_equality.py proves the whole."""

from __future__ import annotations

import random

import pytest
import torch
from fields import EOS, VOCAB, constrained
from paceline.actors.constraints import DeadEnd, Shaper
from paceline.actors.grammar import GrammarError, Grammars, from_ebnf, from_json_schema, from_regex
from paceline.actors.values import Constraints
from test_text import codec_of

CODEC, TOKENIZER = codec_of("byte_level")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB, {EOS})


def test_any_way_to_a_path_gives_the_same_logits() -> None:
    """By commits, by drafts, or by both: as the constraints' own words have it."""
    rng = random.Random(0)
    rows = torch.randn(20, 12, generator=torch.Generator().manual_seed(0)) * 3
    constraints = Constraints(((1, 2.0), (5, -3.0)), 1.4, 0.3, -0.2, ((2,), (3, 4), (4, 4, 3)), 5, (0, 7))
    for row in rows:
        prompt, output = (tuple(rng.randrange(12) for _ in range(rng.randrange(1, 9))) for _ in range(2))
        expected = constrained(row, constraints, prompt, output).float()
        for committed in range(len(output) + 1):
            for known in range(committed + 1):
                shaper = Shaper(constraints, prompt, output[:known], 12)
                shaper.advance(output[known:committed])
                before = row.clone()
                torch.testing.assert_close(shaper(row, output[committed:]), expected)
                assert torch.equal(row, before), "the logits themselves are somebody else's"


def test_ids_that_a_smaller_vocabulary_lacks_are_left_out() -> None:
    constraints = Constraints(((1, 1.0), (99, 1.0)), 2.0, bad_words=((50, 2), (3,)), min_tokens=2, ends=(0, 77))
    found = Shaper(constraints, (1, 99), (), 4)(torch.ones(4), ())
    assert found.tolist() == [-torch.inf, 1.0, 1.0, -torch.inf]


def test_a_mask_that_leaves_nothing_is_a_dead_end() -> None:
    words = tuple((token,) for token in range(4))
    with pytest.raises(DeadEnd, match="bad_words: no token is left that could come after 1 tokens"):
        Shaper(Constraints(bad_words=words), (1,), (2,), 4)(torch.zeros(4), ())


def test_a_grammar_with_min_tokens_may_be_a_dead_end(grammars: Grammars) -> None:
    digits = Constraints(grammar=from_regex("7?"), min_tokens=3, ends=(EOS,))
    seven = CODEC.encode("7")
    shaper = Shaper(digits, (3,), (), VOCAB, grammars.matcher)
    shaper(torch.zeros(VOCAB), ())
    assert shaper.end(seven) == 1, "nothing can follow, so min_tokens has to give way"
    with pytest.raises(DeadEnd, match=r"response_format: no token is left .* bad_words and min_tokens rule out"):
        shaper(torch.zeros(VOCAB), seven)


def test_the_end_is_open_where_the_text_is_complete(grammars: Grammars) -> None:
    shaper = Shaper(Constraints(grammar=from_regex("[0-9]{2,3}"), ends=(EOS,)), (3,), (), VOCAB, grammars.matcher)
    open_at = [bool(shaper(torch.zeros(VOCAB), CODEC.encode("777")[:count])[EOS] == 0) for count in range(3)]
    assert open_at == [False, False, True]
    ignoring = Shaper(Constraints(grammar=from_regex("[0-9]{2,3}")), (3,), (), VOCAB, grammars.matcher)
    assert ignoring(torch.zeros(VOCAB), CODEC.encode("77"))[EOS] == -torch.inf


def test_paths_may_be_visited_in_any_order(grammars: Grammars) -> None:
    grammar = from_json_schema('{"type": "array", "items": {"enum": ["ab", 12]}}')
    ids = CODEC.encode_part('["ab", 12,"ab"]')
    expected = [grammars.matcher(grammar).allowed(ids[:count], ()) for count in range(len(ids))]
    matcher, rng = grammars.matcher(grammar), random.Random(1)
    for _ in range(60):
        count = rng.randrange(len(ids))
        assert (matcher.allowed(ids[:count], ()) == expected[count]).all()
        with pytest.raises(GrammarError, match="breaks the grammar"):
            matcher.allowed((*ids[:count], EOS + 1), ())
    matcher.advance(ids[:4])
    assert (matcher.allowed(ids[4:6], ()) == expected[6]).all()


@pytest.mark.parametrize(
    ("make", "text", "reason"),
    [
        (from_json_schema, "{", "not JSON"),
        (from_json_schema, "[]", "a JSON object"),
        (from_json_schema, '{"items":' * 2000 + "{}" + "}" * 2000, "nested too deeply"),
        (from_json_schema, "[" * 30000, "nested too deeply"),
        (from_json_schema, '{"minimum": 999999999999999999999999999999}', "not JSON serializable"),
        (from_json_schema, '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "use anyOf"),
        (from_ebnf, "root ::= " + "(" * 3000, "nested too deeply"),
        (from_json_schema, '{"type": "nothing"}', "nothing"),
        (from_regex, "(ab", "unclosed group"),
        (from_regex, "a(?=b)", "look-around"),
        (from_ebnf, "start: unknown", "unknown"),
        (from_ebnf, "root ::= (", r"\w"),
        (from_ebnf, "%%%", r"\w"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_says_why(make, text: str, reason: str, grammars: Grammars) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(GrammarError, match=reason):
        grammars.check(make(text))


@pytest.mark.parametrize("text", ['root ::= "yes" | "no" [a-z]*', 'start: "yes" | /no[a-z]*/'])
def test_both_notations_of_ebnf_are_understood(text: str, grammars: Grammars) -> None:
    grammars.check(from_ebnf(text))
    matcher = grammars.matcher(from_ebnf(text))
    for said, complete in (("yes", True), ("nob", False)):
        assert matcher.complete(CODEC.encode_part(said)) is complete


def test_masks_are_those_of_a_matcher_that_never_was_elsewhere(grammars: Grammars) -> None:
    """In any order of nodes, across a tree: what was looked at before leaves no trace."""
    rng, grammar = random.Random(2), from_json_schema("true")
    for _ in range(40):
        start = [int(t) for t in CODEC.encode_part("[[9")[: rng.randrange(4)]]
        matcher = grammars.matcher(grammar)
        matcher.advance(start)
        paths: list[tuple[int, ...]] = [()]
        for _ in range(12):
            path = rng.choice(paths)
            fresh = grammars.matcher(grammar)
            fresh.advance((*start, *path))
            expected = fresh.allowed((), ())
            assert (matcher.allowed(path, ()) == expected).all(), (start, path)
            allowed = expected.nonzero()[0].tolist()
            paths += [(*path, rng.choice(allowed)) for _ in range(2) if allowed]


HOSTILE = {
    "ambiguous": from_ebnf('root ::= e\ne ::= e e e | e e | "a" | "b" | "ab"\n'),
    "empty": from_ebnf('root ::= e*\ne ::= e? e? "a"? '),
    "long": from_regex("a{1000000}"),
    "nested": from_regex("((a{1000}){1000}){1000}"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("ambiguous", "empty") else []) for name in HOSTILE],
)
def test_a_hostile_grammar_comes_to_an_end_before_it_costs_much(name: str, grammars: Grammars) -> None:
    """It is refused by a bound on the work per token, which is the same on every machine."""
    a = CODEC.encode_part("a")
    matcher = grammars.matcher(HOSTILE[name])

    def follow() -> None:
        for _ in range(3000):
            matcher.allowed((), ())
            matcher.advance(a)

    with pytest.raises(GrammarError):
        follow()
    # It can be asked again, and says it again.
    with pytest.raises(GrammarError):
        matcher.allowed(a, ())


def test_a_grammar_that_is_too_large_is_refused_before_any_loop_follows_it(grammars: Grammars) -> None:
    properties = ", ".join(f'"k{i}": {{"type": "string"}}' for i in range(3000))
    with pytest.raises(GrammarError, match="too"):
        grammars.check(from_json_schema(f'{{"type": "object", "properties": {{{properties}}}}}'))
