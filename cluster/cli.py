"""The command line: what can be said on it, and what it says when something is wrong.

Nothing heavy is imported here, so that `--help` and a mistyped option answer at once; `commands` does the work.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import FrameType
from typing import Annotated, Literal

import typer

log = logging.getLogger(__name__)

app = typer.Typer(
    name="paceline",
    help="Speculative decoding with drafters and verifiers on separate devices.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

_U32, _U64 = 2**32 - 1, 2**64 - 1

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help='The prompt; "-" reads it from standard input.')]
Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Call the server there (see `paceline up`) and start nothing."),
]
ServeAt = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to serve gRPC; port 0 takes a free one.")]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The target: a directory, a .gguf file, a hub id or an alias (see `paceline models`). "
        "[default: smollm2-135m]",
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help='The drafter: a model, or "ngram" (prompt lookup), or "none". [default: ngram]'),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where the models run. [default: auto]"),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"] | None,
    typer.Option(help="Number format of the weights; auto is bfloat16 where the device has it. [default: auto]"),
]
Schedule = Annotated[
    str | None,
    typer.Option(metavar="S", help="Who works when: plain, sync or amusd. [default: amusd, or the server's]"),
]
K = Annotated[
    int | None,
    typer.Option(min=0, max=_U32, metavar="K", help="Depth of the draft, 1 to 32. [default: 4, or the server's]"),
]
Temperature = Annotated[float, typer.Option(metavar="X", help="0 is greedy; 1 leaves the model's odds as they are.")]
TopP = Annotated[float, typer.Option(metavar="X", help="Keep the likeliest tokens of this much probability; 1: all.")]
TopK = Annotated[int, typer.Option(min=0, max=_U32, metavar="N", help="Keep the N likeliest tokens; 0: all.")]
MinP = Annotated[float, typer.Option(metavar="X", help="Drop tokens below X times the likeliest one; 0: none.")]
Seed = Annotated[
    int | None,
    typer.Option(min=0, max=_U64, metavar="N", help="Fixes all randomness. [default: drawn, and shown at the end]"),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=0, max=_U32, metavar="N", help="The most tokens to generate. [default: 256, if they fit]"),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="S", help="End where this string is complete; may be given up to 16 times."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")]
Raw = Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")]
KvTokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="Cached positions over all requests, in each actor. [default: 16384]"),
]
MaxSessions = Annotated[
    int | None,
    typer.Option(metavar="N", help="Requests that run at once; more wait. [default: 16]"),
]
MaxQueue = Annotated[
    int | None,
    typer.Option(metavar="N", help="Requests that may wait; more are refused. [default: 256]"),
]
Grace = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="How long running requests may go on after Ctrl-C.")
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("paceline"))
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens inside, to stderr.")] = False,
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Speculative decoding with drafters and verifiers on separate devices."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format=form)
    logging.getLogger("paceline").setLevel(logging.DEBUG if verbose else logging.WARNING)
    # What goes wrong in a call is said by us; gRPC would add a traceback for each call that is cut off by the end.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)


@app.command()
def up(
    address: ServeAt = "127.0.0.1:50051",
    target: Target = None,
    drafter: Drafter = None,
    device: Device = None,
    dtype: Dtype = None,
    schedule: Schedule = None,
    k: K = None,
    kv_tokens: KvTokens = None,
    max_sessions: MaxSessions = None,
    max_queue: MaxQueue = None,
    grace: Grace = 10.0,
) -> None:
    """Start a verifier and a drafter, and serve them over gRPC until Ctrl-C.

    The first Ctrl-C (or SIGTERM) takes no more calls and lets the running ones end within the grace time; the second
    one ends them at once.  --schedule and --k are for requests that do not choose for themselves.

    \b
    Examples:
      paceline up
      paceline up --target ./my-model --drafter ./my-drafter --schedule sync --k 6
      paceline up --address 0.0.0.0:50051 --dtype float32
    """
    with _reported():
        from paceline.cluster import commands

        settings = {"schedule": schedule, "k": k, "kv_tokens": kv_tokens}
        settings |= {"max_sessions": max_sessions, "max_queue": max_queue}
        config = commands.configure(target, drafter, device, dtype, **settings)
        commands.up(config, address, grace)


@app.command()
def generate(
    prompt: Prompt,
    address: Address = None,
    target: Target = None,
    drafter: Drafter = None,
    device: Device = None,
    dtype: Dtype = None,
    schedule: Schedule = None,
    k: K = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    json: Json = False,
    raw: Raw = False,
) -> None:
    """Answer one prompt: the text goes to stdout as it comes, a line of statistics to stderr.

    Without --address, a verifier and a drafter are started for this prompt and stopped again.

    \b
    Examples:
      paceline generate "Why is the sky blue?"
      paceline generate --address 127.0.0.1:50051 --temperature 0.7 --seed 1 "Tell me a story."
      paceline generate --target ./my-model --drafter none --raw --max-tokens 32 "Once upon a time"
      paceline generate --json "Count to five." | python -m json.tool
      cat question.txt | paceline generate -
    """
    with _reported():
        from paceline.cluster import commands

        request = commands.options(schedule, k, temperature, top_p, top_k, min_p, seed, max_tokens, stop or [])
        where = commands.where(address, target, drafter, device, dtype)
        commands.generate(where, request, commands.read_prompt(prompt), raw=raw, as_json=json)


@app.command()
def chat(
    address: Address = None,
    target: Target = None,
    drafter: Drafter = None,
    device: Device = None,
    dtype: Dtype = None,
    schedule: Schedule = None,
    k: K = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
) -> None:
    """Talk with a model, line by line; it remembers what was said.

    /reset begins anew, /exit or Ctrl-D ends.  Ctrl-C cancels the running answer; at the prompt it ends.

    \b
    Examples:
      paceline chat
      paceline chat --address 127.0.0.1:50051 --temperature 0.7 --max-tokens 512
    """
    with _reported():
        from paceline.cluster import commands

        request = commands.options(schedule, k, temperature, top_p, top_k, min_p, seed, max_tokens, stop or [])
        commands.chat(commands.where(address, target, drafter, device, dtype), request)


@app.command()
def models() -> None:
    """List the models that can be named by an alias, and those in the cache.

    \b
    Example:
      paceline models
    """
    with _reported():
        from paceline.cluster import commands

        commands.models()


@bench.command("link")
def bench_link() -> None:
    """Measure the link between drafter and verifier against Ray actor calls.

    \b
    Example:
      paceline bench link
    """
    with _reported():
        from paceline.cluster import commands

        commands.bench_link()


@bench.command("schedules")
def bench_schedules(
    target: Target = None,
    drafter: Drafter = None,
    device: Device = None,
    dtype: Dtype = None,
    k: K = None,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per prompt.")] = 64,
) -> None:
    """Measure the schedules side by side: eight prompts, one at a time, greedy, on a cell of their own.

    \b
    Examples:
      paceline bench schedules
      paceline bench schedules --drafter ./my-drafter --k 6 --tokens 128
    """
    with _reported():
        from paceline.cluster import commands

        commands.bench_schedules(commands.configure(target, drafter, device, dtype, k=k), tokens)


@contextmanager
def _reported() -> Iterator[None]:
    """Every error as one line on stderr and an exit code: 2 what was asked is wrong, 1 it failed, 130 Ctrl-C."""
    # gRPC's own log lines would stand beside ours; it reads this when it is first imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="strict" if stream is sys.stdin else "backslashreplace")
    from paceline.cluster import commands, terminal

    with _terminable() as signalled:
        try:
            yield
        except commands.Failure as failure:
            terminal.error(str(failure))
            raise typer.Exit(failure.code) from failure
        except KeyboardInterrupt:
            raise typer.Exit(128 + signalled[-1]) from None
        except BrokenPipeError:
            # The reader has left, as `head` does; Python would complain about what it cannot flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(128 + signal.SIGPIPE) from None
        except Exception as error:
            log.debug("unexpected", exc_info=True)
            terminal.error(f"unexpected {type(error).__name__}: {error} (paceline --verbose ... shows more)")
            raise typer.Exit(1) from error


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, so that all it started is taken down.  Yields what came."""
    signalled: list[int] = [signal.SIGINT]

    def interrupt(number: int, frame: FrameType | None) -> None:
        signalled.append(number)
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield signalled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """The console script `paceline`."""
    app()
