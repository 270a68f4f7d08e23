"""What the command line does: each of its commands, from the options to what stands on the terminal."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.cluster import terminal
from paceline.cluster.backend import CellError
from paceline.cluster.client import CallError, Client, connect
from paceline.cluster.config import CellConfig
from paceline.cluster.gateway import AddressError, RunningGateway, check_address, serve, split_address
from paceline.cluster.requests import Invalid, check_options
from paceline.v1 import generation_pb2 as pb
from pydantic import ValidationError

if TYPE_CHECKING:
    from paceline.cluster.cell import Cell

WRONG, FAILED = 2, 1
# A wait longer than this is explained.
_PATIENCE = 2.0
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
    target: str | None, drafter: str | None, device: str | None, dtype: str | None, **settings: object
) -> CellConfig:
    """The cell that is asked for; what is None keeps its default.  Raises Failure."""
    settings |= {"target": target, "drafter": drafter, "device": device, "dtype": dtype}
    try:
        return CellConfig.model_validate({name: value for name, value in settings.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][0]).replace("_", "-")
        raise Failure(f"{flag}: {first['msg'].removeprefix('Value error, ')}", WRONG) from error


def where(address: str | None, target: str | None, drafter: str | None, device: str | None, dtype: str | None) -> Where:
    """Who is to answer.  Raises Failure where both a server and a cell's options are given."""
    chosen = {"--target": target, "--drafter": drafter, "--device": device, "--dtype": dtype}
    given = [flag for flag, value in chosen.items() if value is not None]
    if address is None:
        return Where(None, configure(target, drafter, device, dtype))
    if given:
        raise Failure(f"{given[0]} is settled where the server is started; leave it out with --address", WRONG)
    try:
        split_address(address)
    except AddressError as error:
        raise Failure(f"--address: {error}", WRONG) from error
    return Where(address, CellConfig())


def options(
    schedule: str | None,
    k: int | None,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int | None,
    max_tokens: int | None,
    stop: Sequence[str],
) -> pb.GenerateRequest:
    """A request without its prompt, checked as far as that goes without a model.  Raises Failure."""
    for text in stop:
        _whole(text, "--stop")
    request = pb.GenerateRequest(
        sampling=pb.SamplingOptions(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed),
        speculation=pb.SpeculationOptions(schedule=schedule, k=k),
        max_tokens=max_tokens,
        stop=stop,
    )
    try:
        check_options(request)
    except Invalid as error:
        raise Failure(str(error), WRONG) from error
    return request


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
def _cell(config: CellConfig) -> Iterator[Cell]:
    """A running cell; it is taken down at the end, and no further Ctrl-C keeps it from that."""
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
        yield cell
    finally:
        cell.stop()


@contextmanager
def _answering(runner: asyncio.Runner, where: Where) -> Iterator[str]:
    """The address of who answers: of the server that was named, or of a gateway of our own."""
    if where.address is not None:
        yield where.address
        return
    with _cell(where.config) as cell:
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


async def _ask(client: Client, request: pb.GenerateRequest, answer: terminal.Answer, show: bool) -> None:
    """Fill `answer`, and write its text as it comes if `show`."""
    with terminal.Progress() as progress:
        loop = asyncio.get_running_loop()
        waiting = loop.call_later(_PATIENCE, progress, "waiting for the first token")
        try:
            async for response in client.generate(request):
                waiting.cancel()
                progress.clear()
                answer.add(response)
                if show:
                    terminal.write(response.text)
        finally:
            waiting.cancel()
            if show and answer.text and not answer.text.endswith("\n"):
                terminal.write("\n")


async def _ask_at(address: str, request: pb.GenerateRequest, answer: terminal.Answer, show: bool) -> None:
    async with connect(address) as client:
        await _ask(client, request, answer, show)


# The commands


def generate(where: Where, request: pb.GenerateRequest, prompt: str, raw: bool, as_json: bool) -> None:
    """Answer one prompt.  Raises Failure."""
    if not prompt:
        raise Failure("PROMPT: the prompt is empty; give at least one character", WRONG)
    if raw:
        request.text = prompt
    else:
        request.chat.messages.add(role="user", content=prompt)
    with _plainly(), asyncio.Runner() as runner, _answering(runner, where) as address:
        answer = terminal.Answer()
        runner.run(_ask_at(address, request, answer, show=not as_json))
    if answer.finish is None:
        raise Failure("the answer has no end")
    if as_json:
        terminal.write(json.dumps(terminal.as_object(answer, answer.finish)) + "\n")
    terminal.note(terminal.statistics(answer, answer.finish))


def chat(where: Where, request: pb.GenerateRequest) -> None:
    """Talk until /exit.  Raises Failure; KeyboardInterrupt at the prompt."""
    with _plainly(), asyncio.Runner() as runner, _answering(runner, where) as address:
        model = runner.run(_model(address))
        if not model.has_chat_template:
            raise Failure(f"{model.target} has no chat template; use `paceline generate --raw`", WRONG)
        terminal.note(f"{model.target}, drafter {model.drafter}, {model.dtype}. {_CHAT_HINT}.")
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
        runner.run(_ask_at(address, request, answer, show=True))
    except KeyboardInterrupt:
        terminal.note("cancelled; Ctrl-C again ends")
    except CallError as error:
        terminal.error(str(error))
    if answer.finish is not None:
        terminal.note(terminal.statistics(answer, answer.finish))
    if answer.text or answer.finish is not None:
        request.chat.messages.add(role="assistant", content=answer.text)
    else:
        del request.chat.messages[-1]


def up(config: CellConfig, address: str, grace: float) -> None:
    """Serve until Ctrl-C.  Raises Failure."""
    with _plainly():
        # Better now than after the models are loaded.
        check_address(address)
        with asyncio.Runner() as runner, _cell(config) as cell:
            runner.run(_serve(cell, address, grace))


async def _serve(cell: Cell, address: str, grace: float) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    gateway = await serve(cell.backend, cell.codec, address)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        _announce(cell, gateway)
        await stop.wait()
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
    terminal.write(f"{model.target} (drafter {model.drafter}, {model.dtype}) is served at {gateway.address}\n")
    terminal.write(f"Try: {command}\nCtrl-C ends.\n")
    host, _ = split_address(gateway.address)
    if not _loopback(host):
        terminal.note("whoever reaches this address can use it: there is neither TLS nor authentication")


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


def bench_link() -> None:
    """Measure and show the link."""
    from paceline.cluster import link_bench

    with terminal.Progress() as progress:
        progress("measuring the link and Ray actor calls")
        rows = link_bench.measure()
    terminal.write(link_bench.render(rows) + "\n")


def bench_schedules(config: CellConfig, tokens: int) -> None:
    """Measure and show the schedules."""
    from paceline.cluster import schedule_bench

    with _cell(config) as cell, terminal.Progress() as progress:
        table = schedule_bench.run(cell.backend, cell.codec, config.k, tokens, progress)
    terminal.write(table + "\n")
