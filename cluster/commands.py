"""What the command line does: each of its commands, from the options to what stands on the terminal."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.actors.schedules import MAX_K
from paceline.cluster import terminal
from paceline.cluster.backend import BackendError, CellError
from paceline.cluster.client import CallError, Client, connect
from paceline.cluster.config import CellConfig
from paceline.cluster.gateway import AddressError, RunningGateway, check_address, serve, split_address
from paceline.cluster.requests import MAX_TEMPERATURE, Invalid, check_options
from paceline.v1 import generation_pb2 as pb
from pydantic import ValidationError

if TYPE_CHECKING:
    from paceline.actors.values import Speculation
    from paceline.cluster.bench_report import Report
    from paceline.cluster.bench_run import Plan
    from paceline.cluster.cell import Cell
    from paceline.cluster.exact_run import Plan as ExactPlan

WRONG, FAILED = 2, 1
# A wait longer than this is explained.
_PATIENCE = 2.0
# Those that are not called as their fields are.
_FLAGS: Mapping[object, str] = {"drafters": "--drafter"}
_CHAT_HINT = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C cancels the answer"


class Failure(Exception):
    """Ends the command with this message and exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Where:
    """Who answers: the server at `address`, or a cell of our own made from `config`."""

    address: str | None
    config: CellConfig


# From the command line's words


def configure(
    target: str | None, drafters: Sequence[str] | None, device: str | None, dtype: str | None, **settings: object
) -> CellConfig:
    """The cell that is asked for; what is None keeps its default.  Raises Failure."""
    settings |= {"target": target, "drafters": drafters, "device": device, "dtype": dtype}
    try:
        return CellConfig.model_validate({name: value for name, value in settings.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        flag = _FLAGS.get(first["loc"][0], "--" + str(first["loc"][0]).replace("_", "-"))
        raise Failure(f"{flag}: {first['msg'].removeprefix('Value error, ')}", WRONG) from error


def where(
    address: str | None, target: str | None, drafters: Sequence[str] | None, device: str | None, dtype: str | None
) -> Where:
    """Who is to answer.  Raises Failure where both a server and a cell's options are given."""
    chosen = {"--target": target, "--drafter": drafters, "--device": device, "--dtype": dtype}
    given = [flag for flag, value in chosen.items() if value is not None]
    if address is None:
        return Where(None, configure(target, drafters, device, dtype))
    if given:
        raise Failure(f"{given[0]} is settled where the server is started; leave it out with --address", WRONG)
    try:
        split_address(address)
    except AddressError as error:
        raise Failure(f"--address: {error}", WRONG) from error
    return Where(address, CellConfig())


def options(
    speculation: Mapping[str, Any], sampling: Mapping[str, Any], fields: Mapping[str, Any]
) -> pb.GenerateRequest:
    """A request without its prompt, checked as far as that goes without a model.  Raises Failure.

    speculation, sampling, fields: the fields of SpeculationOptions, of SamplingOptions, and others of GenerateRequest;
    None leaves one to the server.
    """
    for name, flag in (("stop", "--stop"), ("bad_words", "--bad-word")):
        for text in fields.get(name) or ():
            _whole(text, flag)
    request = pb.GenerateRequest(
        sampling=pb.SamplingOptions(**sampling),
        speculation=pb.SpeculationOptions(**speculation),
        **fields,
    )
    try:
        check_options(request)
    except Invalid as error:
        raise Failure(str(error), WRONG) from error
    return request


def biases(given: Sequence[str]) -> dict[int, float]:
    """The biases in texts like "17=-2.5".  Raises Failure."""
    found: dict[int, float] = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError as error:
            raise Failure(f"--logit-bias: {text!r} is not understood; write ID=BIAS, as 17=-2.5", WRONG) from error
        if not 0 <= int(token) < 1 << 32:
            raise Failure(f"--logit-bias: {token} is no token id", WRONG)
    return found


def response_format(json_schema: str | None, regex: str | None, grammar: str | None) -> pb.ResponseFormat | None:
    """What form the answer shall have; a text like "@FILE" stands for what is in the file.  Raises Failure."""
    given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    forms = {name: text for name, text in given.items() if text is not None}
    flags = {name: "--" + name.replace("_", "-") for name in forms}
    if len(forms) > 1:
        raise Failure(f"{' and '.join(flags.values())} are two forms for one answer; leave one out", WRONG)
    if not forms:
        return None
    return pb.ResponseFormat(**{name: _text_of(text, flags[name]) for name, text in forms.items()})


def _text_of(text: str, flag: str) -> str:
    if not text.startswith("@"):
        return _whole(text, flag)
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise Failure(f"{flag}: {text[1:]} cannot be read: {error}", WRONG) from error


def _check_writable(flag: str, path: Path | None) -> None:
    """Raise Failure where nothing can be written to `path`."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise Failure(f"{flag}: {path} cannot be written; name a file in a folder that is there", WRONG)


def read_prompt(prompt: str) -> str:
    """The prompt itself, or all of standard input where it is "-", less its last newline.  Raises Failure."""
    if prompt != "-":
        return _whole(prompt, "PROMPT")
    with _plainly():
        return sys.stdin.read().removesuffix("\n")


def _whole(text: str, what: str) -> str:
    """`text`, if the bytes it came from were UTF-8.  Raises Failure."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Failure(f"{what} is not UTF-8", WRONG) from error
    return text


# Who answers


@contextmanager
def _cell(config: CellConfig, trace: Path | None = None) -> Iterator[Cell]:
    """A running cell; it is taken down at the end, and no further Ctrl-C keeps it from that.

    trace: where to write what it did, before.
    """
    from paceline.cluster.models import ModelError

    try:
        with terminal.Progress() as progress:
            # Importing torch and Ray takes seconds.
            progress("starting")
            from paceline.cluster.cell import Cell

            cell = Cell.start(config, progress)
    except ModelError as error:
        raise Failure(str(error), WRONG) from error
    except CellError as error:
        raise Failure(str(error)) from error
    try:
        try:
            yield cell
        finally:
            if trace is not None:
                _save_trace(trace, cell)
    finally:
        cell.stop()


def _save_trace(path: Path, cell: Cell) -> None:
    from paceline.actors.trace import write_chrome

    try:
        write_chrome(path, cell.trace())
    except OSError as error:
        terminal.error(f"--trace: {path} cannot be written: {error.strerror}")
    else:
        terminal.note(f"the timeline is in {path}; open it in https://ui.perfetto.dev")


@contextmanager
def _answering(runner: asyncio.Runner, where: Where, trace: Path | None = None) -> Iterator[str]:
    """The address of who answers: of the server that was named, or of a gateway of our own."""
    if where.address is not None:
        yield where.address
        return
    with _cell(where.config, trace) as cell:
        gateway = runner.run(serve(cell.backend, cell.codec, "127.0.0.1:0"))
        try:
            yield gateway.address
        finally:
            runner.run(gateway.stop())


@contextmanager
def _plainly() -> Iterator[None]:
    """The errors that a user can do something about as failures."""
    try:
        yield
    except CallError as error:
        raise Failure(str(error), WRONG if error.wrong else FAILED) from error
    except AddressError as error:
        raise Failure(str(error), WRONG) from error
    except UnicodeError as error:
        raise Failure("the input is not UTF-8", WRONG) from error


async def _ask(client: Client, request: pb.GenerateRequest, answers: Sequence[terminal.Answer], show: bool) -> None:
    """Fill `answers`, one per choice, and write the text as it comes if `show`."""
    with terminal.Progress() as progress:
        loop = asyncio.get_running_loop()
        waiting = loop.call_later(_PATIENCE, progress, "waiting for the first token")
        try:
            async for response in client.generate(request):
                waiting.cancel()
                progress.clear()
                answers[response.index].add(response)
                if show:
                    terminal.write(response.text)
        finally:
            waiting.cancel()
            if show:
                terminal.end_line(answers[0].text)


async def _ask_at(address: str, request: pb.GenerateRequest, answers: Sequence[terminal.Answer], show: bool) -> None:
    async with connect(address) as client:
        await _ask(client, request, answers, show)


# The commands


def generate(
    where: Where, request: pb.GenerateRequest, prompt: str, raw: bool, as_json: bool, trace: Path | None
) -> None:
    """Answer one prompt, and write the timeline to `trace`.  Raises Failure."""
    _check_writable("--trace", trace)
    if trace is not None and where.address is not None:
        raise Failure("--trace is for who starts the cell: `paceline up --trace`; leave it out with --address", WRONG)
    if not prompt:
        raise Failure("PROMPT: the prompt is empty; give at least one character", WRONG)
    if raw:
        request.text = prompt
    else:
        request.chat.messages.add(role="user", content=prompt)
    with _plainly(), asyncio.Runner() as runner, _answering(runner, where, trace) as address:
        answers = [terminal.Answer() for _ in range(request.n or 1)]
        runner.run(_ask_at(address, request, answers, show=not as_json and len(answers) == 1))
    if as_json:
        terminal.write(json.dumps(terminal.as_object(answers)) + "\n")
    elif len(answers) > 1:
        for index, answer in enumerate(answers):
            terminal.write(f"[{index}]\n{answer.text}")
            terminal.end_line(answer.text)
    for answer in answers:
        terminal.note(terminal.statistics(answer))


def chat(where: Where, request: pb.GenerateRequest) -> None:
    """Talk until /exit.  Raises Failure; KeyboardInterrupt at the prompt."""
    with _plainly(), asyncio.Runner() as runner, _answering(runner, where) as address:
        model = runner.run(_model(address))
        if not model.has_chat_template:
            raise Failure(f"{model.target} has no chat template; use `paceline generate --raw`", WRONG)
        terminal.note(f"{model.target}, {_drafting(model.drafters)}, {model.dtype}. {_CHAT_HINT}.")
        _converse(runner, address, request)


async def _model(address: str) -> pb.GetModelResponse:
    async with connect(address) as client:
        return await client.model()


def _converse(runner: asyncio.Runner, address: str, request: pb.GenerateRequest) -> None:
    messages = request.chat.messages
    while (line := terminal.ask("> ")) is not None and line.strip() != "/exit":
        if line.strip() == "/reset":
            del messages[:]
        elif line.strip():
            messages.add(role="user", content=line)
            _turn(runner, address, request)


def _turn(runner: asyncio.Runner, address: str, request: pb.GenerateRequest) -> None:
    """One answer.  What was said of it is remembered; a question that got none is forgotten."""
    answer = terminal.Answer()
    try:
        runner.run(_ask_at(address, request, [answer], show=True))
    except KeyboardInterrupt:
        terminal.note("cancelled; Ctrl-C again ends")
    except CallError as error:
        terminal.error(str(error))
    if answer.finish is not None:
        terminal.note(terminal.statistics(answer))
    if answer.text or answer.finish is not None:
        request.chat.messages.add(role="assistant", content=answer.text)
    else:
        del request.chat.messages[-1]


def up(config: CellConfig, address: str, grace: float, trace: Path | None) -> None:
    """Serve until Ctrl-C, then write the timeline to `trace`.  Raises Failure."""
    _check_writable("--trace", trace)
    with _plainly():
        # Better now than after the models are loaded.
        check_address(address)
        with asyncio.Runner() as runner, _cell(config, trace) as cell:
            runner.run(_serve(cell, address, grace))


async def _serve(cell: Cell, address: str, grace: float) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    gateway = await serve(cell.backend, cell.codec, address)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        _announce(cell, gateway)
        watching = asyncio.create_task(_watch_drafters(cell))
        await stop.wait()
        watching.cancel()
        terminal.note(f"stopping; running requests have {grace:g} s, Ctrl-C again ends them at once")
        stop.clear()
        await _drain(gateway, grace, stop)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _drain(gateway: RunningGateway, grace: float, hurry: asyncio.Event) -> None:
    draining = asyncio.create_task(gateway.stop(grace))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait((draining, hurried), return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        await gateway.stop()
    hurried.cancel()
    await draining


def _announce(cell: Cell, gateway: RunningGateway) -> None:
    model = cell.backend.model
    command = shlex.join(["paceline", "generate", "--address", gateway.address, "Why is the sky blue?"])
    terminal.write(f"{model.target} ({_drafting(model.drafters)}, {model.dtype}) is served at {gateway.address}\n")
    terminal.write(f"Try: {command}\nCtrl-C ends.\n")
    host, _ = split_address(gateway.address)
    if not _loopback(host):
        terminal.note("whoever reaches this address can use it: there is neither TLS nor authentication")


def _drafting(drafters: Sequence[str]) -> str:
    """Who drafts, in words."""
    return f"drafter{'s' if len(drafters) > 1 else ''} {', '.join(drafters)}" if drafters else "no drafter"


async def _watch_drafters(cell: Cell) -> None:
    """Tell when a drafter is lost, and when it is back, until the verifier is gone."""
    known: frozenset[str] = frozenset()
    before = known
    # That the verifier is gone is told by the gateway.
    with suppress(BackendError):
        async for now in cell.watch_drafters():
            for name in sorted(before - now):
                terminal.note(f"{name} is lost; requests go on without it")
            for name in sorted(now - before & known):
                terminal.note(f"{name} is back")
            known, before = known | now, now


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def models() -> None:
    """List what can be named."""
    from paceline.cluster.models import list_models

    entries = list_models()
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        state = "cached" if entry.directory is not None else "to fetch"
        terminal.write(f"{entry.name:<{width}}  {entry.size / 1e6:6.0f} MB  {state:<8}  {entry.origin}\n")


def picture(trace: Path, out: Path, start: float | None, length: float) -> None:
    """Draw `length` milliseconds of a trace.  Raises Failure."""
    from paceline.cluster import trace_picture

    try:
        out.write_text(trace_picture.draw(trace_picture.read(trace), start, length), encoding="utf-8")
    except trace_picture.TraceUnreadable as error:
        raise Failure(str(error), WRONG) from error
    except OSError as error:
        raise Failure(f"{error.filename}: {error.strerror}", WRONG) from error


def vocab_rank(tokenizer: str, texts: Sequence[Path], out: Path, keep: int | None) -> None:
    """Write the ids of the tokens of `texts`, ranked by frequency.  Raises Failure."""
    from paceline.cluster import vocab
    from paceline.cluster.models import ModelError, resolve

    try:
        with terminal.Progress() as progress:
            ids = vocab.rank(resolve(tokenizer, progress=progress), texts, keep, progress)
        out.write_text(json.dumps(ids) + "\n", encoding="utf-8")
    except ModelError as error:
        raise Failure(str(error), WRONG) from error
    except OSError as error:
        raise Failure(f"--out: {out} cannot be written: {error.strerror}", WRONG) from error
    terminal.note(f"{len(ids)} ids are in {out}")


def bench_link() -> None:
    """Measure and show the link."""
    from paceline.cluster import link_bench

    with terminal.Progress() as progress:
        progress("measuring the link and Ray actor calls")
        rows = link_bench.measure()
    terminal.write(link_bench.render(rows) + "\n")


def bench_engine(
    config: CellConfig, nodes: str, cached: int, rounds: int, int8: bool, peers: bool, file: Path | None
) -> None:
    """Measure and show the passes of one model, and save them to `file`.  Raises Failure."""
    _check_writable("--json", file)
    counts = _numbers("--nodes", nodes, int, 0, 512)
    from paceline.actors.attention import UnsupportedModel
    from paceline.actors.device import Device
    from paceline.cluster import engine_bench
    from paceline.cluster.models import ModelError, resolve

    try:
        with terminal.Progress() as progress:
            device = Device.resolve(config.device)
            directory = resolve(config.target, progress=progress).directory
            dtype = device.dtype(config.dtype)
            kinds = [engine_bench.Model(config.target, directory, dtype, held) for held in (False, True)[: 1 + int8]]
            results = [
                engine_bench.measure(kind, device, counts, cached, rounds, peers and not kind.int8, progress)
                for kind in kinds
            ]
    except (ModelError, UnsupportedModel, ValueError) as error:
        raise Failure(str(error), WRONG) from error
    terminal.write(engine_bench.render(results) + "\n")
    if file is not None:
        file.write_text(json.dumps([result.as_object() for result in results], indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class BenchFiles:
    """Where the benchmark's results go; None: nowhere.  gguf: the target's weights for llama.cpp, if known."""

    json: Path | None = None
    html: Path | None = None
    trace: Path | None = None
    gguf: Path | None = None


def bench_configs(
    drafters: Sequence[str] | None, target: str | None, device: str | None, dtype: str | None, **settings: object
) -> list[CellConfig]:
    """A cell per entry of `drafters`, which may join several drafters by "+".  Raises Failure."""
    sets = [None] if not drafters else [tuple(entry.split("+")) for entry in drafters]
    return [configure(target, one, device, dtype, **settings) for one in sets]


def bench_plan(
    schedules: str | None,
    k: str,
    batch: str,
    temperature: str,
    tokens: int,
    prompts: int | None,
    speculation: Speculation,
) -> Plan:
    """What to measure, from the command line's lists.  Raises Failure."""
    from paceline.cluster import bench_prompts
    from paceline.cluster.bench_run import ALL_SCHEDULES, Plan

    names = ALL_SCHEDULES if schedules is None else tuple(name.strip() for name in schedules.split(","))
    for name in names:
        if name not in ALL_SCHEDULES:
            raise Failure(f"--schedules: {name!r} is none of {', '.join(ALL_SCHEDULES)}", WRONG)
    numbers = {
        "ks": _numbers("--k", k, int, 1, MAX_K),
        "batches": _numbers("--batch", batch, int, 1, 1024),
        "temperatures": _numbers("--temperature", temperature, float, 0, MAX_TEMPERATURE),
    }
    try:
        return Plan(tuple(bench_prompts.load(prompts)), speculation, names, **numbers, tokens=tokens)
    except ValueError as error:
        raise Failure(f"--prompts: {error}", WRONG) from error


def _numbers(flag: str, text: str, kind: Callable[[str], Any], least: float, most: float) -> tuple[Any, ...]:
    """The numbers in a list such as "1,8".  Raises Failure."""
    try:
        numbers = tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as error:
        raise Failure(f"{flag}: {text!r} is no list of numbers such as 1,8", WRONG) from error
    for number in numbers:
        if not least <= number <= most:
            raise Failure(f"{flag}: must be from {least} to {most}, got {number}", WRONG)
    return numbers


def bench_run(configs: Sequence[CellConfig], plan: Plan, peers: bool, files: BenchFiles) -> None:
    """Measure, show and save.  What is complete when it is interrupted, or fails, is shown and saved too."""
    from paceline.cluster import bench_report

    for flag, path in (("--json", files.json), ("--html", files.html), ("--trace", files.trace)):
        _check_writable(flag, path)
    settings = {
        "target": configs[0].target,
        "drafters": [bench_report.drafter_label(config.drafters) for config in configs],
        "prompts": len(plan.prompts),
        "tokens per answer, at most": plan.tokens,
        "link delay": f"{1e3 * configs[0].link_delay:g} ms",
    }
    save = None if files.json is None else partial(bench_report.write_json, files.json)
    report = bench_report.Report(bench_report.about(["paceline", *sys.argv[1:]], settings), save)
    for config in configs:
        with _kept(report, files):
            _bench_cell(config, plan, peers, files, report)
    report.complete = True
    _bench_results(report, files)


@contextmanager
def _kept(report: Report, files: BenchFiles) -> Iterator[None]:
    """If the body fails or is interrupted, show and save what is complete by then."""
    try:
        yield
    except BaseException:
        if not report.shown:
            _bench_results(report, files)
        raise


def _bench_cell(config: CellConfig, plan: Plan, peers: bool, files: BenchFiles, report: Report) -> None:
    """Measure on one cell.  The first one, before which nothing is in the report, has all the peers beside it."""
    from paceline.cluster import bench_peers, bench_run

    with _cell(config) as cell, terminal.Progress() as progress:
        wanted = bench_peers.wanted(config, cell.backend.model.dtype, files.gguf, report, progress) if peers else []
        # Kept at once: to take the cell down may take long, or fail.
        with _kept(report, files), bench_peers.running(wanted, report.note, progress) as ready:
            try:
                bench_run.measure(plan, cell, config.drafters, ready, report, progress)
            except (bench_run.MeasurementFailed, BackendError, CellError) as error:
                raise Failure(str(error)) from error
            finally:
                progress.clear()


def _bench_results(report: Report, files: BenchFiles) -> None:
    from paceline.actors.trace import write_chrome
    from paceline.cluster import bench_page, bench_report

    report.shown = True
    if not report.complete:
        terminal.note(f"cut short; {len(report.rows)} rows are there")
    terminal.write(bench_report.as_text(report) + "\n")
    if files.json is not None:
        bench_report.write_json(files.json, report)
    if files.html is not None:
        bench_page.write_html(files.html, report)
    if files.trace is not None:
        write_chrome(files.trace, report.spans)
    written = [str(path) for path in (files.json, files.html, files.trace) if path is not None]
    if written:
        terminal.note(f"written: {', '.join(written)}")


def exact_plan(
    config: CellConfig, prompts: int, temperature: float, seed: int, tokens: int, margin: float | None
) -> ExactPlan:
    """What to check on a cell, as many requests at once as it runs.  Raises Failure."""
    from paceline.cluster import bench_prompts
    from paceline.cluster.exact_run import Plan as ExactPlan

    options({}, {"temperature": temperature, "seed": seed}, {})
    if margin is not None and not 0 <= margin < math.inf:
        raise Failure(f"--margin: must be a number of nats from 0 on, got {margin}", WRONG)
    try:
        wanted = tuple(bench_prompts.load(prompts))
    except ValueError as error:
        raise Failure(f"--prompts: {error}", WRONG) from error
    return ExactPlan(wanted, config.speculation, temperature, seed, tokens, config.max_sessions, margin)


def verify_exact(config: CellConfig, plan: ExactPlan, file: Path | None) -> None:
    """Answer, read again, show and save; if it is interrupted, what is known by then.  Raises Failure."""
    _check_writable("--json", file)
    from paceline.actors.exactness import Report as ExactReport
    from paceline.cluster import exact_run
    from paceline.cluster.bench_run import MeasurementFailed

    with _cell(config) as cell, terminal.Progress() as progress:
        dtype, codec = cell.backend.model.dtype, cell.codec
        try:
            answered = exact_run.answer(cell, plan, progress)
        except (MeasurementFailed, BackendError) as error:
            raise Failure(str(error)) from error
    report = ExactReport((), plan.allowed(dtype))
    try:
        with terminal.Progress() as progress:
            for checked in exact_run.check(config, dtype, answered, codec.eos_ids, progress):
                report = report.plus(checked)
                progress.clear()
                terminal.write(exact_run.describe(checked, codec.piece))
    finally:
        terminal.write(exact_run.render(report, len(plan.prompts)) + "\n")
        if file is not None:
            exact_run.write_json(file, config, plan, report, codec.piece)
    if report.broken:
        raise Failure(f"{len(report.broken)} positions differ by more than {report.margin:.3g} nats")
