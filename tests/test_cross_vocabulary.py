"""A drafter with a tokenizer of its own: what it is told, what it guesses, and that it changes no token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import table_models as tables
import torch
from conftest import TableModel
from local_cell import Answer, LocalCell
from paceline.actors.cross_vocabulary import Translation, Vocabulary
from paceline.actors.drafters import Ask, DrafterFull, ModelDrafter, Start
from paceline.actors.grammar import from_regex
from paceline.actors.rule import perturbed
from paceline.actors.text import TextCodec
from paceline.actors.torch_engine import load_engine
from paceline.actors.tree import ROOT, DraftTree, NewNode
from paceline.actors.values import FREE, Constraints, Request, Sampling, Speculation
from paceline.cluster.config import CellConfig
from paceline.cluster.models import ModelError, check_foreign, check_pair
from pydantic import ValidationError
from real_cell import answers, requests
from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|user|>"]
CPU = torch.device("cpu")
GREEDY, WARM = Sampling(), Sampling(temperature=1.0, seed=2**64 - 3)


def byte_level(corpus: str, size: int) -> Tokenizer:
    """Like SmolLM2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([corpus] * 3, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Gemma's: "▁" is a space, one token per byte for what has no piece, and a special token before a text."""
    pieces = ["▁", "t", "h", "e", "i", "n", "s", "▁t", "▁th", "▁the", "in", "\n"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("i", "n")]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<s>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def words(*, strange: bool = False) -> Tokenizer:
    """One whose only words are its own; as a kind that nobody can translate, if it is strange."""
    vocabulary = {token: id for id, token in enumerate([*SPECIAL, "wug", "▁wugs"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<s>"))
    tokenizer.decoder = (
        decoders.WordPiece() if strange else decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    )
    return tokenizer


TARGET = "the quick brown fox thinks that the lazy dog barks; ünïcode 🙂🙃 then, thence, therein"
DRAFTER = "the in thin than brown frown crown; fix the box; the lazy cat naps in the sun"


def give(directory: Path, tokenizer: Tokenizer) -> Path:
    """Put a tokenizer beside a checkpoint."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", extra_special_tokens=["<|user|>"]
    )
    fast.save_pretrained(directory)
    return directory


@pytest.fixture
def checkpoint(table_model: TableModel) -> Callable[[Tokenizer], Path]:
    """Writes a checkpoint with a tokenizer; two of its ids mean nothing."""

    def write(tokenizer: Tokenizer) -> Path:
        size = tokenizer.get_vocab_size() + 2
        return give(table_model(torch.zeros(size, size), eos=1), tokenizer)

    return write


@pytest.fixture
def target(checkpoint: Callable[[Tokenizer], Path]) -> Path:
    return checkpoint(byte_level(TARGET, 300))


# The translation


@pytest.mark.parametrize("drafter", [byte_level(DRAFTER, 290), byte_fallback()], ids=["byte-level", "byte-fallback"])
def test_what_both_have_is_the_same_text_and_all_else_is_spelled_out(
    drafter: Tokenizer, target: Path, checkpoint: Callable[[Tokenizer], Path]
) -> None:
    ours, theirs = Vocabulary(target), Vocabulary(checkpoint(drafter))
    translation = Translation(ours, theirs)
    pairs = dict(zip(translation.target_ids, translation.drafter_ids, strict=True))
    assert pairs.pop(1) == 1, "the ends of a text"
    assert len(set(pairs.values())) == len(pairs) > 250
    assert not {0, 2} & (pairs.keys() | set(pairs.values()))
    for token, text in ours.texts.items():
        spelled = translation.feed([token])
        assert b"".join(theirs.texts.get(id, b"\xff") for id in spelled) == text
        assert (token in pairs) == (len(spelled) == 1)
    assert translation.feed([0, 2, 301]) == []
    outside = [token for token in ours.texts if token not in pairs]
    assert len(outside) > 10
    assert translation.feed([*outside, 1]) == [*(id for token in outside for id in translation.feed([token])), 1]


def test_a_space_is_a_space_and_a_byte_is_its_character(target: Path, checkpoint: Callable[[Tokenizer], Path]) -> None:
    codec, drafter = TextCodec.load(target), checkpoint(byte_fallback())
    fallback = TextCodec.load(drafter)
    translation = Translation.load(target, drafter)
    (the,) = codec.encode(" the")
    assert translation.feed([the]) == list(fallback.encode(" the")[1:])
    assert len(translation.feed([the])) == 1
    # "e" has a piece beside its byte token, "q" has not.
    assert [fallback.piece(id) for id in translation.feed(codec.encode("e"))] == ["e"]
    assert translation.feed(codec.encode("e")) != [3 + ord("e")]
    assert translation.feed(codec.encode("q")) == [3 + ord("q")]


def test_a_prompt_is_tokenized_anew_as_a_whole(target: Path, checkpoint: Callable[[Tokenizer], Path]) -> None:
    codec, drafter = TextCodec.load(target), checkpoint(byte_fallback())
    translation = Translation.load(target, drafter)
    text = "the thin 🙂 the"
    ids = [2, *codec.encode(text), 1, 300]
    assert translation.prompt(ids) == list(TextCodec.load(drafter).encode(text))
    assert translation.prompt([]) == [0]


def test_a_drafter_that_cannot_be_translated_for_is_refused(
    target: Path, checkpoint: Callable[[Tokenizer], Path], table_model: TableModel
) -> None:
    # Three of its 300 are special, and no text has the byte 255.
    with pytest.raises(ValueError, match="has 0 of the target's 296 tokens, which are too few"):
        Translation.load(target, checkpoint(words()))
    with pytest.raises(ValueError, match=r"tokenizer in .* cannot be translated"):
        Translation.load(target, checkpoint(words(strange=True)))
    mute = table_model(torch.zeros(8, 8))
    check_foreign(target, target)
    for pair, who in (((target, mute), "drafter"), ((mute, target), "target")):
        with pytest.raises(ModelError, match=f"the {who} .* has no tokenizer, and a foreign drafter"):
            check_foreign(*pair)


def test_a_drafter_of_another_tokenizer_is_refused_with_the_cure(
    target: Path, checkpoint: Callable[[Tokenizer], Path]
) -> None:
    with pytest.raises(ModelError, match='write "foreign:" before this one'):
        check_pair(target, checkpoint(byte_level(DRAFTER, 300)))


def test_the_config_takes_a_foreign_model() -> None:
    assert CellConfig(drafters=("foreign:./dir", "ngram")).drafters == ("foreign:./dir", "ngram")
    for wrong in ("foreign:", "foreign:ngram", "foreign:int8", "foreign:oracle:alpha=1,cost=0", "foreign:foreign:x"):
        with pytest.raises(ValidationError, match='"foreign:" stands before a model'):
            CellConfig(drafters=(wrong,))
    with pytest.raises(ValidationError, match=r"drafter_vocab\n.*foreign:x guesses what both vocabularies have"):
        CellConfig(drafters=("ngram", "foreign:x"), drafter_vocab=8)
    assert CellConfig(drafters=("foreign:x",), drafter_vocab=None).drafter_vocab is None


# The guesses


class Foreign:
    """A drafter whose logits depend on all that it was fed, and what it has to know about it."""

    def __init__(self, target: Path, directory: Path, kind: Tokenizer) -> None:
        self.model = tiny_model("llama", vocab_size=kind.get_vocab_size(), pad_token_id=None)
        self.model.save_pretrained(directory)
        self.translation = Translation.load(target, give(directory, kind))
        self.engine = load_engine(directory, CPU, torch.float32, 4096, head=self.translation.drafter_ids)
        self.drafter = ModelDrafter(self.engine, translation=self.translation)

    def guesses(self, session: int, tree: DraftTree, parent: int, width: int = 6) -> list[int]:
        for _ in range(20):
            (answer,) = self.drafter.propose([Ask(session, tree, parent, width)])
            if answer is not None:
                return [guess.token for guess in answer]
        raise AssertionError("the drafter never answered")

    def expected(self, prompt: Sequence[int], output: Sequence[int], sampling: Sampling, width: int = 6) -> list[int]:
        """By the model's own forward, and the noise of the target's ids and of the target's position."""
        fed = self.translation.prompt(prompt) + self.translation.feed(output)
        logits = self.model(input_ids=torch.tensor([fed])).logits[0, -1]
        row = torch.full((self.translation.vocab_size,), -torch.inf)
        row[list(self.translation.target_ids)] = logits[list(self.translation.drafter_ids)]
        return perturbed(row, sampling, len(prompt) + len(output)).topk(width).indices.tolist()


@pytest.fixture(params=[byte_level(DRAFTER, 290), byte_fallback()], ids=["byte-level", "byte-fallback"])
def foreign(request: pytest.FixtureRequest, target: Path, tmp_path: Path) -> Foreign:
    return Foreign(target, tmp_path / "drafter", request.param)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_after_any_course_the_guesses_are_those_of_the_model_after_the_same_text(
    sampling: Sampling, foreign: Foreign, target: Path
) -> None:
    """Committed are guesses, tokens that it lacks, and such as have no text at all."""
    prompt, output, rng = [2, *TextCodec.load(target).encode("the lazy 🙂")], list[int](), random.Random(4)
    lacking = [id for id in range(3, 300) if id not in foreign.translation.target_ids]
    session, tree = foreign.drafter.open(Start(prompt, sampling, len(prompt))), DraftTree(len(prompt))
    for number in range(1, 25):
        first = foreign.guesses(session, tree, ROOT)
        assert first == foreign.expected(prompt, output, sampling)
        nodes = [NewNode(4 * number + i, ROOT, token, -0.1) for i, token in enumerate(first[:2])]
        tree = tree.grow(nodes, tree.base_len).tree
        best = tree.children[ROOT, first[0]]
        below = foreign.guesses(session, tree, best)
        assert below == foreign.expected(prompt, [*output, first[0]], sampling)
        tree = tree.grow([NewNode(4 * number + 2, best, below[0], -0.1)], tree.base_len).tree
        other = rng.choice(lacking)
        guessed = [first[:1], [first[1]], [first[0], below[0]]]
        committed = rng.choice([*guessed, [other], [first[0], other], [0], [first[0], 2], [other, 301]])
        foreign.drafter.reroot(session, tree, committed)
        output, tree = [*output, *committed], tree.reroot(committed)
        fresh = foreign.drafter.open(Start([*prompt, *output], sampling, len(prompt)))
        assert foreign.guesses(session, tree, ROOT) == foreign.guesses(fresh, DraftTree(tree.base_len), ROOT)
        foreign.drafter.close(fresh)
        foreign.engine.check()


def test_without_any_text_and_any_special_token_a_session_goes_undrafted(target: Path, tmp_path: Path) -> None:
    for kind, refused in ((byte_level(DRAFTER, 290), True), (byte_fallback(), False)):
        foreign = Foreign(target, tmp_path / str(refused), kind)
        if refused:
            with pytest.raises(DrafterFull, match="no text yet"):
                foreign.drafter.open(Start([2], GREEDY, 1))
        else:
            session = foreign.drafter.open(Start([2], GREEDY, 1))
            assert foreign.guesses(session, DraftTree(1), ROOT) == foreign.expected([2], [], GREEDY)


# The cell


TABLE_SIZE = 300
KINDS = {"byte-level": byte_level(DRAFTER, 290), "byte-fallback": byte_fallback()}


class Pair:
    """A target that is a table, and a drafter that is a blurred copy of it in other tokens."""

    def __init__(self, kind: str, table_model: TableModel) -> None:
        table = tables.random_table(TABLE_SIZE, seed=1, spread=2.5)
        table[:, : len(SPECIAL)] = -1e4
        self.target = give(table_model(table, eos=1), byte_level(TARGET, TABLE_SIZE))
        size = KINDS[kind].get_vocab_size()
        # Only its vocabulary counts for now.
        self.translation = Translation.load(self.target, give(table_model(torch.zeros(size, size), eos=1), KINDS[kind]))
        ours, theirs = (torch.tensor(ids) for ids in (self.translation.target_ids, self.translation.drafter_ids))
        copy = torch.zeros(size, size)
        copy[theirs[:, None], theirs] = tables.blurred(table, seed=2, spread=0.7)[ours[:, None], ours]
        self.drafter = table_model(copy, eos=1)

    def plain(self, requests: Sequence[Request]) -> list[Answer]:
        cell = LocalCell(self.target, self.draft())
        return cell.run([_scheduled(request, "plain") for request in requests])

    def draft(self, compile: Any = None) -> ModelDrafter:
        engine = load_engine(self.drafter, CPU, torch.float32, 4096, head=self.translation.drafter_ids)
        return ModelDrafter(engine, compile=compile, translation=self.translation)

    def run(self, requests: Sequence[Request], schedule: str, *, compile: bool = False) -> list[Answer]:
        grammars = TextCodec.load(self.target).grammars(TABLE_SIZE) if compile else None
        cell = LocalCell(self.target, self.draft(grammars.matcher if grammars else None), speed=6.0)
        found = cell.run([_scheduled(request, schedule) for request in requests])
        cell.settle()
        assert not cell.drafter.counters["failed_sessions"]
        return found


def _scheduled(request: Request, schedule: str) -> Request:
    return Request(
        request.id,
        request.prompt,
        request.sampling,
        request.max_tokens,
        speculation=Speculation(schedule, 4),
        constraints=request.constraints,
    )


def _requests(sampling: Sampling, constraints: Constraints = FREE) -> list[Request]:
    prompts = ((40, 50, 60), (2, 270, 280, 290))
    return [Request(f"r{i}", prompt, sampling, 40, constraints=constraints) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_foreign_drafter_changes_no_token(sampling: Sampling, kind: str, table_model: TableModel) -> None:
    pair = Pair(kind, table_model)
    expected = [answer.tokens for answer in pair.plain(_requests(sampling))]
    assert {token for tokens in expected for token in tokens} - set(pair.translation.target_ids)
    for schedule in ("sync", "amusd", "saguaro", "swiftspec"):
        found = pair.run(_requests(sampling), schedule)
        assert [answer.tokens for answer in found] == expected, schedule
        drafted, accepted = (sum(getattr(a.stats, field) for a in found) for field in ("drafted", "accepted"))
        assert 0 < accepted < drafted, schedule


CONSTRAINTS = {
    "penalties": Constraints(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((70, 4.0), (290, 6.0))),
    "bad words": Constraints(bad_words=((50,), (80, 90)), min_tokens=10),
    "grammar": Constraints(grammar=from_regex("[a-z ]{60,80}")),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_it_obeys_what_the_request_asks_of_the_target(sampling: Sampling, name: str, table_model: TableModel) -> None:
    pair = Pair("byte-fallback", table_model)
    wanted = _requests(sampling, CONSTRAINTS[name])
    found = pair.run(wanted, "sync", compile=True)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in pair.plain(wanted)]
    assert [answer.tokens for answer in found] != [answer.tokens for answer in pair.plain(_requests(sampling))]
    assert sum(answer.stats.accepted for answer in found) > 0


# Gemma and SmolLM2


@pytest.fixture(scope="module")
def cell(smollm2_dir: Path) -> Iterator[Any]:
    from paceline.cluster.cell import Cell

    name = "foreign:gemma3-270m"
    config = CellConfig(target=str(smollm2_dir), drafters=(name,), dtype="float32", kv_tokens=2048)
    with Cell.start(config) as cell:
        assert cell.backend.model.drafters == (name,)
        yield cell


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_gemma_drafts_for_smollm2(cell: Any, temperature: float) -> None:
    plain, drafted = (
        asyncio.run(answers(cell, requests(cell, schedule, 40, temperature))) for schedule in ("plain", "sync")
    )
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
    assert sum(finish.stats.accepted for _, finish in drafted) > 0
