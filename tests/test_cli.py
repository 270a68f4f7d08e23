"""The command line as its users and their scripts meet it: output, exit codes, signals, what is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from paceline.actors.values import Delta, Request, Sampling, Speculation, Stats
from paceline.cluster import commands, terminal
from paceline.cluster.backend import BackendError
from paceline.cluster.cli import app
from paceline.cluster.config import CellConfig
from paceline.cluster.gateway import RunningGateway, serve
from scripted import ByteCodec, ScriptedBackend, endless, finish, hello
from typer.testing import CliRunner, Result

HERE = Path(__file__).parent
COMMANDS = [["up"], ["generate"], ["chat"], ["models"], ["bench"], ["bench", "link"], ["bench", "run"]]


class Server:
    """A gateway with a scripted backend, in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.backend = ScriptedBackend()
        self.gateway: RunningGateway = self.run(serve(self.backend, ByteCodec(), "127.0.0.1:0"))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def stop(self) -> None:
        self.run(self.gateway.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(20)
        self.loop.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(running: Server) -> Server:
    running.backend.script = hello
    running.backend.requests.clear()
    running.backend.cancelled = asyncio.Queue()
    return running


def paceline(*arguments: str, stdin: str | bytes | None = None) -> Result:
    """Run it in this process."""
    return CliRunner().invoke(app, arguments, input=stdin, prog_name="paceline")


def spawn(*arguments: str, behaviour: str = "hello", **options: Any) -> subprocess.Popen[str]:
    """Run it as a process, whose cell, if it starts one, is scripted."""
    command = [sys.executable, str(HERE / "scripted_cell.py"), behaviour, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen(command, **(pipes | options))


def ended(process: subprocess.Popen[str], stdin: str | None = None) -> tuple[int, str, str]:
    """Exit code and the rest of both outputs."""
    try:
        out, err = process.communicate(stdin, timeout=30)
    finally:
        process.kill()
    return process.returncode, out, err


def failed(result: Result, code: int, message: str) -> None:
    """It ended with this code, and one line that says why."""
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("paceline: ")
    assert message in result.stderr


# generate


def test_generate_streams_text_to_stdout_and_statistics_to_stderr(server: Server):
    result = paceline("generate", "--address", server.gateway.address, "--seed", "5", "hi")
    assert (result.exit_code, result.stdout) == (0, "héllo wörld\n")
    assert result.stderr.count("\n") == 1
    for part in ("6 tokens", "tokens/s", "acceptance length 2.00", "33% drafted", "hit rate 33%", "auto", "seed 5"):
        assert part in result.stderr


def test_the_hit_rate_is_told_where_there_were_drafts_only(server: Server):
    async def undrafted(request: Request) -> AsyncIterator[Delta]:
        end = finish(request, 1)
        yield Delta((1,), "x", dataclasses.replace(end, stats=Stats("plain", verify_passes=1)))

    server.backend.script = undrafted
    result = paceline("generate", "--address", server.gateway.address, "hi")
    assert "0% drafted · plain · stop" in result.stderr


def test_json_is_one_object_with_exactly_the_promised_keys(server: Server):
    result = paceline("generate", "--address", server.gateway.address, "--json", "--seed", str(2**64 - 1), "hi")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "token_ids": [1, 2, 3, 4, 5, 6],
        "text": "héllo wörld",
        "finish_reason": "stop",
        "seed": 2**64 - 1,
        "usage": {"prompt_tokens": 8, "completion_tokens": 6},
        "speculation": {
            "schedule": "auto",
            "drafted": 8,
            "accepted": 2,
            "verify_passes": 3,
            "acceptance_length": 2.0,
            "hits": 1,
            "waited_seconds": 0.25,
            "positions": [{"drafted": 5, "accepted": 2}, {"drafted": 3, "accepted": 0}],
        },
    }
    assert "tokens/s" in result.stderr


def test_the_chat_template_is_used_unless_raw(server: Server):
    paceline("generate", "--address", server.gateway.address, "hi")
    paceline("generate", "--address", server.gateway.address, "--raw", "hi")
    assert [bytes(request.prompt) for request in server.backend.requests] == [b"<user>hi", b"hi"]


def test_every_option_reaches_the_server(server: Server):
    options = "--schedule sync --k 7 --fanout 2 --width 3 --budget 5 "
    options += "--temperature 0.7 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --max-tokens 9"
    paceline("generate", "--address", server.gateway.address, *options.split(), "--stop", "a", "--stop", "b c", "hi")
    (request,) = server.backend.requests
    assert request.sampling == Sampling(0.7, 5, 0.9, 0.1, 3)
    assert request.speculation == Speculation("sync", 7, 2, 3, 5)
    assert (request.max_tokens, request.stop) == (9, ("a", "b c"))


def test_what_is_not_said_is_left_to_the_server(server: Server):
    for _ in range(2):
        paceline("generate", "--address", server.gateway.address, "hi")
    first, second = server.backend.requests
    assert (first.speculation, first.max_tokens, first.stop) == (Speculation("auto", 4), 56, ())
    assert first.sampling.temperature == 0
    assert first.sampling.seed != second.sampling.seed


@pytest.mark.parametrize("stdin", ["hi thére\n", "hi thére"])
def test_a_dash_reads_standard_input(server: Server, stdin: str):
    assert paceline("generate", "--address", server.gateway.address, "-", stdin=stdin).exit_code == 0
    assert bytes(server.backend.requests[0].prompt).decode() == "<user>hi thére"


def test_a_line_stays_within_a_line_that_the_answer_ended(server: Server):
    async def lines(request: Request) -> AsyncIterator[Delta]:
        yield Delta((1,), "one\ntwo\n", finish(request, 1, "length"))

    server.backend.script = lines
    assert paceline("generate", "--address", server.gateway.address, "hi").stdout == "one\ntwo\n"


BAD = [
    (["--temperature", "nan"], "sampling.temperature: must be 0"),
    (["--top-p", "0"], "sampling.top_p"),
    (["--min-p", "2"], "sampling.min_p"),
    (["--k", "0"], "speculation.k: must be from 1 to 32"),
    (["--fanout", "9"], "speculation.fanout: must be from 1 to 8"),
    (["--width", "0"], "speculation.width: must be from 1 to 16"),
    (["--budget", "65"], "speculation.budget: must be from 1 to 64"),
    (["--schedule", "magic"], "speculation.schedule: must be one of plain, sync, pearl, amusd"),
    (["--trace", "trace.json"], "--trace is for who starts the cell"),
    (["--trace", "no/such/folder/trace.json"], "--trace: no/such/folder/trace.json cannot be written"),
    (["--drafter", "ngram"], "--drafter is settled"),
    (["--max-tokens", "0"], "max_tokens: must be at least 1"),
    (["--max-tokens", "57"], "max_tokens: must be from 1 to 56"),
    (["--stop", ""], "stop[0]"),
    (["--target", "x"], "--target is settled where the server is started"),
    (["--dtype", "float32"], "--dtype is settled"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_wrong_options_exit_with_2_and_name_what_is_wrong(server: Server, options: list[str], message: str):
    failed(paceline("generate", "--address", server.gateway.address, *options, "hi"), 2, message)
    assert not server.backend.requests


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PROMPT"),
        (["--no-such", "hi"], "--no-such"),
        (["--seed", "-1", "hi"], "--seed"),
        (["--seed", str(2**64), "hi"], "--seed"),
        (["--top-k", "-1", "hi"], "--top-k"),
        (["--dtype", "int8", "hi"], "--dtype"),
        (["--temperature", "warm", "hi"], "--temperature"),
    ],
)
def test_wrong_usage_exits_with_2_and_points_to_the_help(arguments: list[str], message: str):
    result = paceline("generate", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "paceline generate" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("prompt", ["", "\udcff"])
def test_a_prompt_that_is_none_exits_with_2(server: Server, prompt: str):
    failed(paceline("generate", "--address", server.gateway.address, prompt), 2, "PROMPT")


@pytest.mark.parametrize(("stdin", "message"), [(b"\xff\xfe", "not UTF-8"), (b"\n", "PROMPT: the prompt is empty")])
def test_a_standard_input_that_is_no_prompt_exits_with_2(server: Server, stdin: bytes, message: str):
    failed(paceline("generate", "--address", server.gateway.address, "-", stdin=stdin), 2, message)


def test_an_address_where_nothing_answers_exits_with_1(unused_port: int):
    result = paceline("generate", "--address", f"127.0.0.1:{unused_port}", "hi")
    failed(result, 1, f"nothing answers at 127.0.0.1:{unused_port}; is `paceline up` running there?")


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_a_malformed_address_exits_with_2():
    failed(paceline("generate", "--address", "localhost", "hi"), 2, "--address: 'localhost' is no address")


def test_a_server_of_another_kind_is_told(monkeypatch: pytest.MonkeyPatch, server: Server):
    from paceline.v1 import generation_pb2_grpc as pb_grpc

    def unimplemented(self: Any, channel: Any) -> None:
        self.Generate = channel.unary_stream("/other.Service/Generate", lambda request: b"", lambda data: data)

    monkeypatch.setattr(pb_grpc.GenerationServiceStub, "__init__", unimplemented)
    failed(paceline("generate", "--address", server.gateway.address, "hi"), 1, "no paceline server of this version")


@pytest.mark.parametrize(("reason", "status"), [("error", "RESOURCE_EXHAUSTED"), ("cancelled", "UNAVAILABLE")])
def test_a_failure_exits_with_1_after_the_text_that_came(server: Server, reason: str, status: str):
    async def failing(request: Request) -> AsyncIterator[Delta]:
        yield Delta((1,), "part", finish(request, 1, reason, error="the queue\nis full", code="exhausted"))

    server.backend.script = failing
    result = paceline("generate", "--address", server.gateway.address, "hi")
    assert (result.exit_code, result.stdout) == (1, "part\n")
    assert result.stderr.count("\n") == 1
    assert status in result.stderr
    failed(paceline("generate", "--address", server.gateway.address, "--json", "hi"), 1, status)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_the_request(server: Server, number: signal.Signals, code: int):
    server.backend.script = endless
    process = spawn("generate", "--address", server.gateway.address, "hi")
    assert process.stdout is not None
    assert process.stdout.read(5) == "first"
    process.send_signal(number)
    assert ended(process) == (code, "\n", "")
    assert server.run(server.backend.cancelled.get()) == server.backend.requests[0].id


def test_a_reader_that_leaves_ends_it_quietly(server: Server):
    async def torrent(request: Request) -> AsyncIterator[Delta]:
        while True:
            yield Delta((1,), "some text\n" * 1000)
            await asyncio.sleep(0.001)

    server.backend.script = torrent
    process = spawn("generate", "--address", server.gateway.address, "hi")
    assert process.stdout is not None
    assert process.stdout.readline() == "some text\n"
    process.stdout.close()
    assert process.wait(30) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert server.run(server.backend.cancelled.get()) == server.backend.requests[0].id


def test_output_is_utf8_whatever_the_locale(server: Server):
    environment = os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0", "LC_ALL": "C"}
    process = spawn("generate", "--address", server.gateway.address, "-", env=environment)
    assert ended(process, "thére")[:2] == (0, "héllo wörld\n")
    assert bytes(server.backend.requests[0].prompt).decode() == "<user>thére"


def test_an_answer_cannot_steer_the_terminal(server: Server):
    async def evil(request: Request) -> AsyncIterator[Delta]:
        yield Delta((1,), "a\x1b]0;b\x07\x9bc\td\n", finish(request, 1))

    server.backend.script = evil
    assert paceline("generate", "--address", server.gateway.address, "hi").stdout == "a\x1b]0;b\x07\x9bc\td\n"
    mine, theirs = pty.openpty()
    process = spawn("generate", "--address", server.gateway.address, "hi", stdout=theirs)
    os.close(theirs)
    code, _, _ = ended(process)
    with os.fdopen(mine, "rb", buffering=0) as terminal:
        assert (code, terminal.read(1000)) == (0, b"a]0;bc\td\r\n")


def test_a_long_wait_for_the_first_token_is_explained(server: Server, monkeypatch: pytest.MonkeyPatch):
    explained = threading.Event()

    class Progress(terminal.Progress):
        def __call__(self, message: str) -> None:
            super().__call__(message)
            explained.set()

    async def patient(request: Request) -> AsyncIterator[Delta]:
        assert await asyncio.to_thread(explained.wait, 20)
        yield Delta((1,), "at last", finish(request, 1))

    monkeypatch.setattr(commands, "_PATIENCE", 0.01)
    monkeypatch.setattr(terminal, "Progress", Progress)
    server.backend.script = patient
    result = paceline("generate", "--address", server.gateway.address, "hi")
    assert (result.exit_code, result.stdout) == (0, "at last\n")
    assert result.stderr.splitlines()[0] == "waiting for the first token"


def test_progress_in_a_log_is_a_line_per_step_and_ten_seconds(capsys: pytest.CaptureFixture[str]):
    seconds = iter(range(100))
    progress = terminal.Progress(clock=lambda: next(seconds))
    for second in range(12):
        progress(f"loading [target], {second} s")
    progress("warming up")
    assert capsys.readouterr().err.splitlines() == ["loading [target], 0 s", "loading [target], 10 s", "warming up"]


def test_a_bug_is_one_line_too(monkeypatch: pytest.MonkeyPatch):
    def buggy(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr(commands, "generate", buggy)
    failed(paceline("generate", "hi"), 1, "unexpected RuntimeError: oh")


# A cell of its own


def test_without_an_address_a_cell_is_started_used_and_stopped():
    code, out, err = ended(spawn("generate", "--target", "some-model", "--drafter", "none", "hi"))
    assert (code, out) == (0, "héllo wörld\n")
    _, starting, stopped, statistics = err.splitlines()
    assert (starting, stopped) == ("starting some-model with none", "cell stopped, 0 of 1 cancelled")
    assert "tokens/s" in statistics


def test_several_drafters_are_started():
    code, _, err = ended(spawn("generate", "--target", "x", "--drafter", "y", "--drafter", "ngram", "hi"))
    assert code == 0
    assert err.splitlines()[:2] == ["starting", "starting x with y and ngram"]


def test_a_timeline_is_written_before_the_cell_is_stopped(tmp_path: Path):
    path = tmp_path / "trace.json"
    code, out, err = ended(spawn("generate", "--trace", str(path), "hi"))
    assert (code, out) == (0, "héllo wörld\n")
    told, stopped = (next(i for i, line in enumerate(err.splitlines()) if part in line) for part in ("perf", "stopped"))
    assert told < stopped
    assert str(path) in err
    assert any(event["name"] == "verify" for event in json.loads(path.read_text())["traceEvents"])


def test_a_timeline_is_written_of_an_answer_that_was_cut_short(tmp_path: Path):
    process = spawn("generate", "--trace", str(tmp_path / "trace.json"), "hi", behaviour="endless")
    assert process.stdout is not None
    assert process.stdout.read(5) == "first"
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_ctrl_c_during_an_answer_stops_the_cell():
    process = spawn("generate", "hi", behaviour="endless")
    assert process.stdout is not None
    assert process.stdout.read(5) == "first"
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130
    assert err.splitlines()[-1] == "cell stopped, 1 of 1 cancelled"


def test_ctrl_c_during_the_start_ends_it():
    process = spawn("generate", "hi", behaviour="slow_start")
    assert process.stderr is not None
    assert process.stderr.readline() == "starting\n"
    assert process.stderr.readline().startswith("starting smollm2-135m with ngram")
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, "", "")


@pytest.mark.parametrize(
    ("behaviour", "code", "message"),
    [("bad_model", 2, "x is no model"), ("bad_cell", 1, "the verifier died")],
)
def test_a_cell_that_does_not_start_is_one_line(behaviour: str, code: int, message: str):
    process = spawn("generate", "--target", "x", "hi", behaviour=behaviour)
    assert ended(process) == (code, "", f"starting\nstarting x with ngram\npaceline: {message}\n")


# up


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("tiny (drafter ngram, float32) is served at 127.0.0.1:")
    address = line.split()[-1]
    assert process.stdout.readline() == f"Try: paceline generate --address {address} 'Why is the sky blue?'\n"
    assert process.stdout.readline() == "Ctrl-C ends.\n"
    return address


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_until_a_signal(number: signal.Signals):
    process = spawn("up", "--address", "127.0.0.1:0")
    result = paceline("generate", "--address", address_of(process), "hi")
    assert (result.exit_code, result.stdout) == (0, "héllo wörld\n")
    process.send_signal(number)
    code, _, err = ended(process)
    assert code == 0
    assert err.splitlines()[-1] == "cell stopped, 0 of 1 cancelled"


def test_up_ends_what_runs_at_the_second_ctrl_c():
    process = spawn("up", "--address", "127.0.0.1:0", "--grace", "60", behaviour="endless")
    address = address_of(process)
    call = spawn("generate", "--address", address, "hi")
    assert call.stdout is not None
    assert call.stdout.read(5) == "first"
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert next(line for line in lines if line.startswith("stopping; running requests have 60 s"))
    failed(paceline("generate", "--address", address, "hi"), 1, "nothing answers")
    assert call.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert (code, err) == (0, "cell stopped, 1 of 1 cancelled\n")
    assert ended(call)[0] == 1


def test_up_ends_what_runs_when_the_grace_is_over():
    process = spawn("up", "--address", "127.0.0.1:0", "--grace", "0.2", behaviour="endless")
    call = spawn("generate", "--address", address_of(process), "hi")
    assert call.stdout is not None
    assert call.stdout.read(5) == "first"
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert (code, err.splitlines()[-1]) == (0, "cell stopped, 1 of 1 cancelled")
    assert ended(call)[0] == 1


def test_up_finds_a_taken_port_before_it_loads_anything(server: Server):
    process = spawn("up", "--address", server.gateway.address)
    code, out, err = ended(process)
    assert (code, out) == (2, "")
    assert (
        err == f"paceline: {server.gateway.address} is in use; choose another port with --address, "
        "or stop what listens there\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "magic"], "--schedule: unknown schedule 'magic'; choose one of plain"),
        (["--k", "99"], "--k: Input should be less than or equal to 32"),
        (["--fanout", "9"], "--fanout: Input should be less than or equal to 8"),
        (["--width", "17"], "--width: Input should be less than or equal to 16"),
        (["--budget", "65"], "--budget: Input should be less than or equal to 64"),
        (["--drafters-per-session", "0"], "--drafters-per-session"),
        (["--drafter", "none", "--drafter", "ngram"], '--drafter: "none" means no drafter at all'),
        (["--drafter", "oracle:alpha=2,cost=0.1"], "--drafter: the oracle's alpha must be between 0 and 1, got 2.0"),
        (["--drafter", "oracle:alpha=0.8"], '--drafter: "oracle:alpha=0.8" lacks cost'),
        (["--trace", "no/such/folder/t.json"], "--trace: no/such/folder/t.json cannot be written"),
        (["--kv-tokens", "1"], "--kv-tokens: Input should be greater than or equal to 256"),
        (["--max-sessions", "0"], "--max-sessions"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--address", "here"], "'here' is no address"),
    ],
)
def test_up_refuses_a_wrong_configuration(options: list[str], message: str):
    failed(paceline("up", *options), 2, message)


class FlickeringCell:
    """A cell whose drafters come and go."""

    def __init__(self, *seen: tuple[str, ...]) -> None:
        self.seen = seen

    async def watch_drafters(self) -> AsyncIterator[frozenset[str]]:
        for seen in self.seen:
            yield frozenset(seen)
        raise BackendError("the verifier is gone")


def test_up_tells_when_a_drafter_is_lost_and_when_it_is_back(capsys: pytest.CaptureFixture[str]):
    one, two = "drafter-0 (ngram)", "drafter-1 (small)"
    cell: Any = FlickeringCell((), (one,), (one, two), (one, two), (two,), (), (two,), (one, two))
    asyncio.run(commands._watch_drafters(cell))
    assert capsys.readouterr().err.splitlines() == [
        f"{one} is lost; requests go on without it",
        f"{two} is lost; requests go on without it",
        f"{two} is back",
        f"{one} is back",
    ]


# chat


def test_chat_remembers_until_it_is_reset(server: Server):
    stdin = "hi\n\nmore\n/reset\nagain\n/exit\nnever\n"
    result = paceline("chat", "--address", server.gateway.address, stdin=stdin)
    assert (result.exit_code, result.stdout) == (0, "héllo wörld\n" * 3)
    assert [bytes(request.prompt).decode() for request in server.backend.requests] == [
        "<user>hi",
        "<user>hi<assistant>héllo wörld<user>more",
        "<user>again",
    ]
    assert "tiny, drafter ngram, float32" in result.stderr
    assert result.stderr.count("tokens/s") == 3


def test_chat_ends_at_the_end_of_input_and_goes_on_after_a_refusal(server: Server):
    stdin = "x" * 100 + "\nhi\n"
    result = paceline("chat", "--address", server.gateway.address, stdin=stdin)
    assert (result.exit_code, result.stdout) == (0, "héllo wörld\n")
    assert "the context of 64 takes at most 63" in result.stderr
    assert [bytes(request.prompt) for request in server.backend.requests] == [b"<user>hi"]


def test_ctrl_c_in_chat_cancels_the_answer_and_at_the_prompt_ends(server: Server):
    server.backend.script = endless
    process = spawn("chat", "--address", server.gateway.address, bufsize=1)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write("hi\n")
    assert process.stdout.read(5) == "first"
    process.send_signal(signal.SIGINT)
    assert server.run(server.backend.cancelled.get()) == server.backend.requests[0].id
    server.backend.script = hello
    process.stdin.write("more\n")
    assert process.stdout.readline() == "\n"
    assert process.stdout.readline() == "héllo wörld\n"
    assert bytes(server.backend.requests[1].prompt) == b"<user>hi<assistant>first<user>more"
    assert next(line for line in process.stderr if "tokens/s" in line)
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130


# The rest


def test_models_lists_the_alias(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    result = paceline("models")
    assert result.exit_code == 0
    assert "smollm2-135m" in result.stdout
    assert "to fetch" in result.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_mentions_every_flag_and_gives_an_example(command: list[str]):
    result = paceline(*command, "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    found: Any = typer.main.get_command(app)
    for word in command:
        found = found.commands[word]
    for option in found.params:
        assert option.opts[0] in result.stdout or option.metavar in result.stdout
        assert getattr(option, "help", "x"), f"{option.name} has no help"
    if command != ["bench"]:
        assert f"  paceline {' '.join(command)}" in result.stdout


def test_help_states_the_defaults_that_hold():
    _, _, text = " ".join(paceline("up", "--help").stdout.split()).partition("Options:")
    names = ("target", "device", "dtype", "drafters_per_session", "kv_tokens", "max_sessions", "max_queue")
    numbers = ("schedule", "k", "fanout", "width", "budget")
    expected = {name: CellConfig.model_fields[name].default for name in (*names, *numbers)}
    expected["drafter"] = " ".join(CellConfig.model_fields["drafters"].default)
    for name, default in expected.items():
        _, _, after = text.partition(f"--{name.replace('_', '-')} ")
        told = f"[default: {default}" + (", or the server's]" if name in numbers else "]")
        assert told in after.split(" --")[0]


def test_the_commands_are_all_there():
    result = paceline("--help")
    assert result.exit_code == 0
    assert all(command[0] in result.stdout for command in COMMANDS)
    assert paceline("--version").stdout.strip() == "0.1.0"


def test_nothing_heavy_is_loaded_for_help_or_a_typo():
    heavy = {"torch", "ray", "transformers", "grpc", "pydantic", "numpy"}
    code = f"import sys, paceline.cluster.cli; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_calling_a_server_needs_neither_torch_nor_ray():
    heavy = {"torch", "ray", "transformers"}
    code = f"import sys, paceline.cluster.commands; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
