"""Drafters that guess part of a vocabulary: which part, and that all else stays as it was."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import table_models as tables
import torch
from conftest import TableModel
from local_cell import LocalCell
from paceline.actors.drafters import Ask, Guess, ModelDrafter, Start
from paceline.actors.engine import Feed
from paceline.actors.torch_engine import TorchEngine, load_engine
from paceline.actors.tree import ROOT, DraftTree, NewNode
from paceline.actors.values import Request, Sampling, Speculation
from paceline.actors.vocabulary import trim_head
from paceline.cluster.cli import app
from paceline.cluster.config import CellConfig
from paceline.cluster.models import ModelError, ModelFiles
from paceline.cluster.vocab import RANKING, head_ids, read_ranking
from pydantic import ValidationError
from tiny_models import VOCAB as TINY_VOCAB
from tiny_models import tiny_model
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models
from torch import Tensor
from transformers import AutoModelForCausalLM, PhiConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

VOCAB = 24
KEPT = (0, 2, 3, 5, 7, 11, 13, 17, 19, 23)
GREEDY, WARM = Sampling(), Sampling(temperature=1.0, seed=2**64 - 3)
CPU = torch.device("cpu")


def loaded(directory: Path, head: tuple[int, ...] | None = None, kv_tokens: int = 4096) -> ModelDrafter:
    return ModelDrafter(load_engine(directory, CPU, torch.float32, kv_tokens, head=head), head=head)


# The head


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2", "qwen3"])
def test_a_trimmed_model_has_the_logits_of_the_whole_one(name: str, tmp_path: Path) -> None:
    """Loading checks it against the model's own forward as well."""
    whole = tiny_model(name)
    whole.save_pretrained(tmp_path)
    ids = (60, 1, 2, 33, 7)
    engine = load_engine(tmp_path, CPU, torch.float32, kv_tokens=64, head=ids)
    tokens = torch.tensor([[50, 60, 3, 0]])
    with torch.inference_mode():
        expected = whole(input_ids=tokens).logits[0][:, list(ids)]
        torch.testing.assert_close(_logits(engine, tokens[0]), expected, atol=1e-4, rtol=0)
    assert engine.vocab_size == TINY_VOCAB
    assert engine.model.get_input_embeddings().weight.shape[0] == TINY_VOCAB


def _logits(engine: TorchEngine, tokens: Tensor) -> Tensor:
    count = len(tokens)
    feed = Feed(engine.open(), tuple(tokens.tolist()), tuple(range(-1, count - 1)), tuple(range(count)))
    return engine.step([feed])[0]


def test_the_bias_of_a_head_is_trimmed_with_it() -> None:
    config = PhiConfig(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    model.lm_head.bias.normal_()
    tokens = torch.tensor([[1, 19]])
    expected = model(input_ids=tokens).logits[..., [19, 4]]
    trim_head(model, [19, 4])
    torch.testing.assert_close(model(input_ids=tokens).logits, expected)


WRONG_HEADS = {
    "must keep at least one": (),
    "token id 24 is outside the drafter's vocabulary of 24": (1, 24),
    "token id -1 is outside": (-1, 2),
    "token id 2 stands in the drafter's vocabulary 2 times": (2, 3, 2),
}


@pytest.mark.parametrize("message", WRONG_HEADS)
def test_a_wrong_head_is_refused(message: str, table_model: TableModel) -> None:
    directory, head = table_model(torch.zeros(VOCAB, VOCAB)), WRONG_HEADS[message]
    with pytest.raises(ValueError, match=message):
        load_engine(directory, CPU, torch.float32, 64, head=head)
    with pytest.raises(ValueError, match=message):
        ModelDrafter(load_engine(directory, CPU, torch.float32, 64), head=head)


# The guesses


@pytest.mark.parametrize("sampling", [GREEDY, WARM, Sampling(0.7, top_k=6, top_p=0.9, seed=5)])
def test_the_guesses_are_those_of_the_whole_drafter_among_what_is_kept(
    sampling: Sampling, table_model: TableModel
) -> None:
    """Its best five here, as the whole drafter ranks the kept tokens: the same noise lies on the same token."""
    table = tables.random_table(VOCAB, seed=3)
    table[:, [id for id in range(VOCAB) if id not in KEPT]] = -50.0
    directory = table_model(table)
    guesses = []
    for drafter in (loaded(directory), loaded(directory, KEPT)):
        session = drafter.open(Start([4, 6], sampling))
        tree = DraftTree(2).grow([NewNode(1, ROOT, 9, -0.1), NewNode(2, ROOT, 11, -0.1)], 2).tree
        drafter.propose([Ask(session, tree, ROOT)])
        guesses.append(drafter.propose([Ask(session, tree, node, 5) for node in (ROOT, 1, 2)]))
    whole, trimmed = guesses
    assert [_tokens(answer) for answer in trimmed] == [_tokens(answer) for answer in whole]
    assert all(token in KEPT for answer in trimmed for token in _tokens(answer))


def _tokens(answer: tuple[Guess, ...] | None) -> list[int]:
    assert answer is not None
    return [guess.token for guess in answer]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("schedule", ["sync", "swiftspec"])
def test_nothing_else_is_ever_guessed_and_acceptance_survives(
    sampling: Sampling, schedule: str, table_model: TableModel
) -> None:
    """The target says other tokens too, which are fed to the drafter; what it is served never changes."""
    target = tables.random_table(VOCAB, seed=1, spread=2.0)
    target[:, tables.EOS] = -1e4
    target[:, [id for id in range(VOCAB) if id not in KEPT]] -= 1.5
    directory = table_model(target)
    rates, texts = [], []
    for head in (None, KEPT):
        drafter = Recorded(loaded(directory, head))
        cell = LocalCell(directory, drafter, speed=8.0)
        requests = [Request(f"r{i}", (i + 1, 4), sampling, 50, speculation=Speculation(schedule, 3)) for i in range(2)]
        answers = cell.run(requests)
        cell.settle()
        texts.append([answer.tokens for answer in answers])
        rates.append(sum(a.stats.accepted for a in answers) / sum(a.stats.verify_passes for a in answers))
        assert drafter.guessed <= set(range(VOCAB) if head is None else KEPT)
    assert texts[0] == texts[1]
    if sampling == WARM:
        assert not {token for text in texts[0] for token in text} <= set(KEPT)
    assert rates[1] > 0.5 * rates[0] > 0.3


class Recorded:
    """A drafter that notes what it guesses."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self._drafter = drafter
        self.guessed: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, asks: list[Ask]) -> list[tuple[Guess, ...] | None]:
        answers = self._drafter.propose(asks)
        self.guessed |= {guess.token for answer in answers for guess in answer or ()}
        return answers


# Which tokens


@pytest.fixture
def drafter_files(tmp_path: Path, table_model: TableModel) -> ModelFiles:
    """Words w1 to w19 as tokens 1 to 19, three special tokens, 0, 20 and 21, and two that mean nothing."""
    directory = table_model(torch.zeros(VOCAB, VOCAB))
    words = ["</s>", *(f"w{id}" for id in range(1, 20)), "<user>", "<bot>"]
    tokenizer = Tokenizer(token_models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>", "<user>", "<bot>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)
    return ModelFiles("drafter", directory)


SPECIAL = (0, 20, 21)


def test_a_number_without_a_ranking_keeps_the_lowest_ids_and_the_special_ones(drafter_files: ModelFiles) -> None:
    assert head_ids(4, drafter_files) == (0, 1, 2, 3, 20, 21)
    assert head_ids(VOCAB, drafter_files) == tuple(range(VOCAB))
    with pytest.raises(ModelError, match="drafter_vocab 25: drafter has 24 in all"):
        head_ids(25, drafter_files)


def test_a_number_keeps_the_first_ones_of_the_ranking_beside_the_checkpoint(drafter_files: ModelFiles) -> None:
    (drafter_files.directory / RANKING).write_text("[9, 21, 3, 12]")
    assert head_ids(3, drafter_files) == (0, 3, 9, 20, 21)
    with pytest.raises(ModelError, match=r"drafter_vocab 5: .*draft_vocab.json ranks 4; ask for at most so many"):
        head_ids(5, drafter_files)


def test_a_model_without_a_tokenizer_keeps_its_end_of_sequence_ids(table_model: TableModel) -> None:
    files = ModelFiles("table", table_model(torch.zeros(VOCAB, VOCAB), eos=17))
    assert head_ids(3, files) == (0, 1, 2, 17)


@pytest.mark.parametrize("text", ["[9, 3, 12]", "9\n3\n12\n", " 9 3\t12", "[9,\n3,\n12]\n"])
def test_a_file_of_ids_keeps_these_and_the_special_ones(text: str, drafter_files: ModelFiles, tmp_path: Path) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    assert head_ids(str(file), drafter_files) == (0, 3, 9, 12, 20, 21)


WRONG_FILES = {
    "must keep at least one token id": "[]",
    "at least one token id, and this one is empty": "",
    "is no list of token ids": "[1, 2",
    "no list of token ids: invalid literal": "1 two 3",
    "must hold token ids only, and '2' is none": '[1, "2"]',
    "must hold token ids only, and True is none": "[1, true]",
    "token id 24 is outside the drafter's vocabulary of 24": "[1, 24]",
    "token id -3 is outside": "1 -3",
    "token id 7 stands in the drafter's vocabulary 2 times": "7 8 7",
}


@pytest.mark.parametrize("message", WRONG_FILES)
def test_a_wrong_file_of_ids_is_refused(message: str, drafter_files: ModelFiles, tmp_path: Path) -> None:
    file = tmp_path / "ids"
    file.write_text(WRONG_FILES[message])
    with pytest.raises(ModelError, match=message) as refused:
        head_ids(str(file), drafter_files)
    assert "drafter_vocab" in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(drafter_files: ModelFiles, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"drafter_vocab: .*none cannot be read: No such file"):
        head_ids(str(tmp_path / "none"), drafter_files)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="cannot be read: it is not UTF-8"):
        head_ids(str(tmp_path / "binary"), drafter_files)


def test_the_config_takes_a_number_or_a_file() -> None:
    assert CellConfig(drafter_vocab="8192").drafter_vocab == 8192
    assert CellConfig(drafter_vocab=3).drafter_vocab == 3
    assert CellConfig(drafter_vocab="ids.json").drafter_vocab == "ids.json"
    assert CellConfig().drafter_vocab is None
    for wrong in ("0", 0, "", -5):
        with pytest.raises(ValidationError, match="drafter_vocab"):
            CellConfig(drafter_vocab=wrong)


# paceline vocab rank


def ranked(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["vocab", "rank", *map(str, arguments)], prog_name="paceline")


@pytest.fixture
def text_of(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / f"text{len(list(tmp_path.glob('text*')))}"
        path.write_text(text)
        return path

    return write


def test_tokens_are_ranked_over_all_texts(
    drafter_files: ModelFiles, text_of: Callable[[str], Path], tmp_path: Path
) -> None:
    texts = [text_of("w5 w4 w5 w9 w9 w9 "), text_of("w2 <bot> w4")]
    out = tmp_path / "out.json"
    result = ranked("--tokenizer", drafter_files.directory, "--out", out, *texts)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"7 ids are in {out}" in result.stderr
    assert json.loads(out.read_text()) == read_ranking(out) == [*SPECIAL, 9, 4, 5, 2]
    assert head_ids(str(out), drafter_files) == (0, 2, 4, 5, 9, 20, 21)
    assert ranked("--tokenizer", drafter_files.directory, "--out", out, "--keep", "5", *texts).exit_code == 0
    assert read_ranking(out) == [*SPECIAL, 9, 4]


def test_what_cannot_be_ranked_is_said(
    drafter_files: ModelFiles, table_model: TableModel, text_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model, out, text = drafter_files.directory, tmp_path / "out.json", text_of("w1")
    (tmp_path / "binary").write_bytes(b"w1 \xff")
    cases: dict[str, tuple[str | Path, ...]] = {
        "TEXTS: they hold no text": ("--tokenizer", model, "--out", out, text_of("")),
        "none cannot be read: No such file": ("--tokenizer", model, "--out", out, tmp_path / "none"),
        "binary cannot be read: it is not UTF-8": ("--tokenizer", model, "--out", out, tmp_path / "binary"),
        "has no tokenizer": ("--tokenizer", table_model(torch.zeros(4, 4)), "--out", out, text),
        "is none of these": ("--tokenizer", "no-such-model", "--out", out, text),
        "--out: ": ("--tokenizer", model, "--out", tmp_path / "no" / "directory.json", text),
    }
    for message, arguments in cases.items():
        result = ranked(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
        assert not out.exists()


# SmolLM2


@pytest.fixture(scope="module")
def three_layers(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A drafter of SmolLM2's first three layers: as fast as a real one, and a poor guesser."""
    directory = tmp_path_factory.mktemp("drafter")
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    del model.model.layers[3:]
    model.config.num_hidden_layers = 3
    model.save_pretrained(directory)
    for file in smollm2_dir.glob("tokenizer*"):
        shutil.copy(file, directory)
    return ModelFiles("three-layers", directory)


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [1, 8])
def test_a_trimmed_small_drafter_takes_less_than_three_quarters_of_a_step(
    leaves: int, three_layers: ModelFiles
) -> None:
    """The head is most of what such a drafter computes."""
    head = head_ids(8192, three_layers)
    assert len(head) == 8192
    tree = DraftTree(200).grow([NewNode(i + 1, ROOT, 500 + i, -0.1) for i in range(leaves)], 200).tree
    drafters = [loaded(three_layers.directory), loaded(three_layers.directory, head)]
    times: list[list[float]] = [[], []]
    for _ in range(12):
        for drafter, taken in zip(drafters, times, strict=True):
            session = drafter.open(Start(list(range(1000, 1200)), GREEDY))
            assert drafter.propose([Ask(session, tree, ROOT)])[0]
            started = time.perf_counter()
            answers = drafter.propose([Ask(session, tree, node) for node in tree.nodes])
            taken.append(time.perf_counter() - started)
            assert all(answers)
            drafter.close(session)
    whole, trimmed = map(statistics.median, times)
    assert trimmed < 0.75 * whole


@pytest.mark.slow
def test_a_trimmed_drafter_agrees_wherever_the_token_was_kept(smollm2_dir: Path) -> None:
    head = head_ids(8192, ModelFiles("smollm2", smollm2_dir))
    tokens = torch.randint(100, 8192, (120,), generator=torch.Generator().manual_seed(0)).tolist()
    trees = DraftTree(20)
    chain = [NewNode(i + 1, i, token, -0.1) for i, token in enumerate(tokens[20:])]
    tree = trees.grow(chain, 20).tree
    found = []
    for drafter in (loaded(smollm2_dir), loaded(smollm2_dir, head)):
        session = drafter.open(Start(tokens[:20], GREEDY))
        drafter.propose([Ask(session, tree, ROOT)])
        drafter.propose([Ask(session, tree, chain[-1].id)])
        found.append([_tokens(drafter.propose([Ask(session, tree, node)])[0])[0] for node in tree.nodes])
    inside = [(whole, trimmed) for whole, trimmed in zip(*found, strict=True) if whole in set(head)]
    assert len(inside) > 30
    assert all(whole == trimmed for whole, trimmed in inside)
    assert set(found[1]) <= set(head)
