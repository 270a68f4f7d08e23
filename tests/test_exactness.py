"""Answers that are read again: right ones pass, every other one is found where it went wrong."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fields
import pytest
import table_models as tables
import torch
from conftest import TableModel
from local_cell import Answer, LocalCell, engine_of
from paceline.actors.constraints import Compile, Shaper
from paceline.actors.device import Device
from paceline.actors.drafters import ModelDrafter
from paceline.actors.exactness import Checked, Position, Report, default_margin, teacher_force
from paceline.actors.grammar import from_regex
from paceline.actors.rule import perturbed
from paceline.actors.text import TextCodec
from paceline.actors.torch_engine import TorchEngine
from paceline.actors.values import FREE, Constraints, Request, Sampling, Speculation, Stats
from paceline.cluster import commands, exact_run
from paceline.cluster.cli import app
from scripted import ByteCodec, ScriptedBackend, hello
from tiny_models import tiny_model
from typer.testing import CliRunner

EOS = frozenset({2})
GREEDY, WARM = Sampling(), Sampling(temperature=0.8, top_k=30, top_p=0.97, min_p=0.001, seed=2**63 + 9)
BOUND = Constraints(
    logit_bias=((7, 4.0), (11, -3.0)),
    repetition_penalty=1.3,
    frequency_penalty=0.2,
    presence_penalty=-0.3,
    bad_words=((7, 7), (5,), (7, 9, 11)),
    min_tokens=20,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose every logit hangs on all that came before."""
    directory = tmp_path_factory.mktemp("target")
    tiny_model("llama").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with noise on it: right some of the time."""
    directory = tmp_path_factory.mktemp("drafter")
    model = tiny_model("llama")
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.05 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def engine(target: Path) -> TorchEngine:
    return engine_of(target)


def some_requests(sampling: Sampling, constraints: Constraints, schedule: str = "saguaro") -> list[Request]:
    return [
        Request(
            f"r{i}",
            tuple(3 + (7 * i + 5 * j) % 50 for j in range(2 + 20 * i)),
            replace(sampling, seed=(sampling.seed + i) % 2**64),
            32,
            speculation=Speculation(schedule, 3),
            constraints=constraints,
        )
        for i in range(3)
    ]


def answered(target: Path, drafter: Path, requests: list[Request], compile: Compile | None = None) -> list[Answer]:
    return LocalCell(target, ModelDrafter(engine_of(drafter), compile=compile), speed=4.0).run(requests)


def scores_before(target: Path, request: Request, tokens: tuple[int, ...], index: int) -> torch.Tensor:
    """What tokens[index] is drawn by, as transformers' own forward has it."""
    model = tiny_model("llama")
    read = torch.tensor([[*request.prompt, *tokens[:index]]])
    shaper = Shaper(replace(request.constraints, ends=(2,)), request.prompt, tokens[:index], model.config.vocab_size)
    return perturbed(shaper(model(input_ids=read).logits[0, -1], ()), request.sampling, read.shape[1])


@pytest.mark.parametrize("constraints", [FREE, BOUND], ids=["free", "bound"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_drafted_answers_are_the_targets_own(
    sampling: Sampling, constraints: Constraints, target: Path, drafter: Path, engine: TorchEngine
):
    requests = some_requests(sampling, constraints)
    answers = answered(target, drafter, requests)
    assert 0 < sum(a.stats.accepted for a in answers) < sum(a.stats.drafted for a in answers)
    for request, answer in zip(requests, answers, strict=True):
        positions = teacher_force(engine, request, answer.tokens, EOS)
        assert [p.index for p in positions] == list(range(len(answer.tokens)))
        assert [p.emitted for p in positions] == list(answer.tokens)
        assert [p for p in positions if p.differs] == []
        assert {p.margin for p in positions} == {0.0}
        assert all(p.lead > 0 for p in positions)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_an_altered_token_is_found_at_its_place_with_its_margin(
    sampling: Sampling, target: Path, drafter: Path, engine: TorchEngine
):
    request = some_requests(sampling, BOUND)[1]
    tokens = answered(target, drafter, [request])[0].tokens
    scores = scores_before(target, request, tokens, 9)
    first, second = scores.topk(2).indices.tolist()
    assert first == tokens[9]
    altered = (*tokens[:9], second, *tokens[10:])
    found = next(p for p in teacher_force(engine, request, altered, EOS) if p.differs)
    assert (found.index, found.emitted, found.preferred, found.fault) == (9, second, first, "")
    assert found.margin == pytest.approx(float(scores[first] - scores[second]), abs=1e-4)
    assert found.margin == found.lead > 0


def test_what_the_constraints_forbid_has_no_finite_margin(target: Path, drafter: Path, engine: TorchEngine):
    request = some_requests(GREEDY, BOUND)[0]
    tokens = answered(target, drafter, [request])[0].tokens
    for index, wrong in ((4, 5), (6, 2)):
        altered = (*tokens[:index], wrong)
        found = teacher_force(engine, request, altered, EOS)[-1]
        assert (found.index, found.emitted, found.preferred) == (index, wrong, tokens[index])
        assert found.margin == math.inf
        assert "constraints" in found.fault
    # Without the target's end among the ends it may come, though it would not.
    assert teacher_force(engine, replace(request, ignore_eos=True), (*tokens[:6], 2), EOS)[-1].margin < math.inf


def test_an_answer_is_held_against_its_grammar(tmp_path: Path):
    target, drafter = fields.write_model(tmp_path / "target"), fields.write_model(tmp_path / "drafter", blur=0.05)
    request = Request("r", (40, 50), WARM, 24, constraints=Constraints(grammar=from_regex("[a-z]{12,30}")))
    engine, codec = engine_of(target), TextCodec.load(target)
    grammars = codec.grammars(engine.vocab_size)
    assert grammars is not None
    answer = answered(target, drafter, [request], grammars.matcher)[0]
    assert answer.stats.accepted > 0
    right = teacher_force(engine, request, answer.tokens, codec.eos_ids, grammars.matcher)
    assert [p for p in right if p.differs] == []
    (digit,) = codec.encode("7")
    altered = (*answer.tokens[:2], digit, *answer.tokens[3:])
    wrong = teacher_force(engine, request, altered, codec.eos_ids, grammars.matcher)
    assert [p.index for p in wrong if p.differs] == list(range(2, len(altered)))
    assert (wrong[2].preferred, wrong[2].margin) == (answer.tokens[2], math.inf)
    # What broke the grammar can be followed by nothing.
    assert {p.preferred for p in wrong[3:]} == {None}
    assert all("breaks the grammar" in p.fault for p in wrong[3:])


def test_logits_that_are_broken_are_told_and_never_allowed(
    target: Path, drafter: Path, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
):
    request = some_requests(WARM, FREE)[0]
    answer = answered(target, drafter, [request])[0]
    step = engine.step

    def poisoned(feeds: Any) -> list[torch.Tensor]:
        rows = step(feeds)
        rows[0][3, 40] = math.nan
        return rows

    monkeypatch.setattr(engine, "step", poisoned)
    positions = teacher_force(engine, request, answer.tokens, EOS)
    assert [p.index for p in positions if p.differs] == [3]
    found = positions[3]
    assert (found.preferred, found.margin) == (None, math.inf)
    assert found.fault == "the target's logits at position 5 have no finite maximum"
    report = Report((Checked(0, tuple(positions), answer.stats),), 1e9)
    assert report.broken == [found]
    assert "nothing can: the target's logits at position 5" in exact_run.describe(report.answers[0], str)


def test_where_nothing_can_come_is_told(engine: TorchEngine):
    """Ends are forbidden at first, and all else is a bad word."""
    everything = Constraints(bad_words=tuple((token,) for token in range(61) if token != 2), min_tokens=2)
    found = teacher_force(engine, Request("r", (3, 4), GREEDY, 4, constraints=everything), (9, 2), EOS)
    assert [p.preferred for p in found] == [None, None]
    assert "no token is left that could come after 0 tokens" in found[0].fault


@pytest.mark.parametrize("chunk", [1, 7, 42, 43])
def test_the_passes_may_be_cut_anywhere(chunk: int, target: Path, drafter: Path, engine: TorchEngine):
    """Prompts end within a pass, at the end of one, and at its beginning."""
    for request in some_requests(WARM, BOUND):
        tokens = answered(target, drafter, [request])[0].tokens
        whole, parts = (teacher_force(engine, request, tokens, EOS, chunk=size) for size in (512, chunk))
        assert [p.preferred for p in parts] == [p.preferred for p in whole]
        assert [p.lead for p in parts] == pytest.approx([p.lead for p in whole], abs=1e-3)
    assert engine.pool.free_blocks == engine.pool.blocks


def test_no_blocks_are_kept_where_it_fails(engine: TorchEngine):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        teacher_force(engine, Request("r", (3, 4), GREEDY, 4), (9, 99, 4), EOS, chunk=2)
    assert engine.pool.free_blocks == engine.pool.blocks
    assert teacher_force(engine, Request("r", (3, 4), GREEDY, 4), (), EOS) == []


def test_a_report_counts():
    same, tied = Position(0, 5, 5, 0.0, 3.0), Position(1, 5, 5, 0.0, 0.1)
    near, far = Position(2, 5, 6, 0.2, 0.2), Position(3, 5, 6, 0.7, 0.6)
    report = Report((), 0.25).plus(Checked(0, (same, tied, near), Stats("sync", drafted=9, accepted=4)))
    assert (report.rate, report.largest, report.near_ties, report.broken) == (1 / 3, 0.2, 2, [])
    report = report.plus(Checked(1, (far,), Stats("sync", drafted=1)))
    assert (report.rate, report.largest, report.near_ties, report.broken) == (0.5, 0.7, 2, [far])
    assert (report.drafted, report.accepted, report.differing) == (10, 4, [near, far])
    assert exact_run.render(report, 3) == (
        "2 of 3 answers, 4 positions: 2 differ (50.000%), by 0.7 nats at most; 0.25 are allowed\n"
        "near ties, the best two scores within 0.25 nats: 50.0% of positions\n"
        "drafts: 10 tokens verified, 4 of them accepted, which is 100.0% of positions"
    )


def test_nothing_is_claimed_of_nothing():
    empty = Report((), 0.25)
    assert (empty.rate, empty.largest, exact_run.render(empty, 3)) == (None, 0.0, "no answer was read again")
    plain = empty.plus(Checked(0, (Position(0, 5, 5, 0.0, 3.0),), Stats("plain")))
    assert exact_run.render(plain, 1).endswith("warning: no draft was accepted, so this says nothing about drafts")


def test_a_run_with_hardly_any_drafts_says_so():
    many = tuple(Position(index, 5, 5, 0.0, 3.0) for index in range(100))
    for accepted, warned in ((4, True), (5, False)):
        report = Report((Checked(0, many, Stats("sync", drafted=9, accepted=accepted)),), 0.25)
        assert ("hardly any draft was accepted" in exact_run.render(report, 1)) is warned


def test_the_margin_is_what_rounding_explains():
    assert default_margin("float32", 0.0) < 0.01 < default_margin("bfloat16", 0.0)
    assert default_margin("bfloat16", 0.5) == 2 * default_margin("bfloat16", 0.0)


# The command


def verify(*options: str) -> Any:
    return CliRunner().invoke(app, ["verify-exact", *options])


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedBackend:
    """A cell that says 1, 2, 3, 4, 5, 6 whatever it is asked, and a process that settles nowhere."""
    backend = ScriptedBackend(hello)

    @contextmanager
    def cell(config: Any) -> Iterator[Any]:
        assert config.max_sessions == 4
        yield type("Cell", (), {"backend": backend, "codec": ByteCodec()})()

    monkeypatch.setattr(commands, "_cell", cell)
    monkeypatch.setattr(Device, "claim", lambda self: None)
    return backend


def counting() -> torch.Tensor:
    """After 1 to 5 comes the next number, after all else 1."""
    table = tables.always(1, 300)
    for number in range(1, 6):
        table[number, [1, number + 1]] = torch.tensor([0.0, 20.0])
    return table


def test_a_target_that_would_have_said_the_same_agrees(
    scripted: ScriptedBackend, table_model: TableModel, tmp_path: Path
):
    file = tmp_path / "exact.json"
    options = ["--prompts", "3", "--tokens", "6", "--schedule", "sync", "--k", "2", "--seed", str(2**64 - 2)]
    result = verify("--target", str(table_model(counting(), context=2048)), *options, "--json", str(file))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("3 of 3 answers, 18 positions: 0 differ (0.000%), by 0 nats at most; 0.001 are")
    assert "answering, 0 of 3 prompts" in result.stderr
    assert "reading again, 0 of 3 answers" in result.stderr
    assert [request.sampling.seed for request in scripted.requests] == [2**64 - 2, 2**64 - 1, 0]
    assert {request.speculation for request in scripted.requests} == {Speculation("sync", 2)}
    assert all(bytes(request.prompt).startswith(b"<user>") for request in scripted.requests)
    saved = json.loads(file.read_text())
    assert (saved["complete"], saved["positions"], saved["differing"], saved["accepted"]) == (True, 18, 0, 6)
    assert (saved["settings"]["k"], saved["machine"]["cores"] > 0) == (2, True)


def test_a_target_that_would_have_said_something_else_fails(
    scripted: ScriptedBackend, table_model: TableModel, tmp_path: Path
):
    table, file = counting(), tmp_path / "exact.json"
    table[3, 9] = 20.5
    options = ["--target", str(table_model(table, context=2048)), "--prompts", "2", "--json", str(file)]
    result = verify(*options)
    assert result.exit_code == 1
    line = r'prompt 0, position 3: ".*" \(4\) came, ".*" \(9\) is preferred by 0.5 nats'
    assert re.match(line, result.stdout), result.stdout
    assert "12 positions: 2 differ (16.667%), by 0.5 nats at most" in result.stdout
    assert result.stderr.endswith("paceline: 2 positions differ by more than 0.001 nats\n")
    (first, _) = json.loads(file.read_text())["differences"]
    assert first.pop("margin") == pytest.approx(0.5, abs=1e-3)
    assert first == {
        "prompt": 0,
        "position": 3,
        "emitted": 4,
        "emitted_text": "\x04",
        "preferred": 9,
        "preferred_text": "\t",
        "fault": "",
    }
    assert verify(*options, "--margin", "0.6").exit_code == 0
    assert verify(*options, "--margin", "0").exit_code == 1


def test_ctrl_c_shows_and_saves_what_is_known(
    scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def interrupted(*_: Any) -> Iterator[Checked]:
        yield Checked(0, (Position(0, 1, 2, math.inf, 1.0, "out of the question"),), Stats("sync", accepted=1))
        raise KeyboardInterrupt

    monkeypatch.setattr(exact_run, "check", interrupted)
    file = tmp_path / "exact.json"
    result = verify("--prompts", "2", "--json", str(file))
    assert result.exit_code == 130
    assert "1 of 2 answers, 1 positions: 1 differ (100.000%), by inf nats at most" in result.stdout
    saved = json.loads(file.read_text())
    assert (saved["complete"], saved["largest_margin"], saved["above_margin"]) == (False, None, 1)
    assert saved["differences"][0]["fault"] == "out of the question"


def test_ctrl_c_while_it_answers_cancels_the_requests():
    command = [sys.executable, str(Path(__file__).with_name("scripted_cell.py")), "endless", "verify-exact"]
    process = subprocess.Popen([*command, "--prompts", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("answering, 0 of 2" in line for line in process.stderr)
    process.send_signal(2)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1].startswith("cell stopped")


def test_an_answer_that_fails_is_a_failure(scripted: ScriptedBackend):
    scripted.down = True
    result = verify("--prompts", "2")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith("paceline: the verifier is gone\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--margin", "-0.1"], "--margin: must be a number of nats from 0 on, got -0.1"),
        (["--margin", "nan"], "--margin: must be a number of nats from 0 on, got nan"),
        (["--margin", "inf"], "--margin: must be a number of nats from 0 on, got inf"),
        (["--prompts", "85"], "--prompts: there are 84 prompts"),
        (["--prompts", "0"], "--prompts"),
        (["--tokens", "0"], "--tokens"),
        (["--batch", "0"], "--batch"),
        (["--batch", "1025"], "--batch"),
        (["--temperature", "-1"], "sampling.temperature: must be 0"),
        (["--temperature", "nan"], "sampling.temperature: must be 0"),
        (["--schedule", "magic"], "--schedule: unknown schedule 'magic'"),
        (["--k", "0"], "--k: Input should be greater than or equal to 1"),
        (["--seed", "-1"], "--seed"),
        (["--json", "/nowhere/rows.json"], "--json: /nowhere/rows.json cannot be written"),
    ],
)
def test_wrong_options_exit_with_2_before_anything_is_started(options: list[str], message: str):
    result = verify(*options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.slow
def test_smollm2_is_exact_in_float32(smollm2_dir: Path, tmp_path: Path):
    file = tmp_path / "exact.json"
    command = [str(Path(sys.executable).parent / "paceline"), "verify-exact", "--target", str(smollm2_dir)]
    command += ["--dtype", "float32", "--drafter", "int8", "--drafter", "ngram", "--schedule", "saguaro"]
    command += ["--prompts", "3", "--tokens", "24", "--temperature", "0.8", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr[-2000:])
    saved = json.loads(file.read_text())
    assert (saved["complete"], saved["answers"], saved["above_margin"]) == (True, 3, 0)
    assert saved["positions"] > 24
    assert saved["accepted"] > 0
    assert saved["warnings"] == []
