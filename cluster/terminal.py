"""How the command line shows answers, statistics, progress and errors.  Answers go to stdout, all else to stderr."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from paceline.v1 import generation_pb2 as pb
from rich.console import Console
from rich.status import Status
from rich.text import Text

# What a model writes must not steer the terminal: no escape sequences, nothing invisible but tab and newline.
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])

_NUMBER = re.compile(r"[0-9.]+")


@dataclass(slots=True)
class Answer:
    """A streamed answer as far as it has come.  Times in seconds of `clock`."""

    clock: Callable[[], float] = time.monotonic
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish: pb.Finish | None = None
    first_at: float | None = None
    ended_at: float | None = None
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    def add(self, response: pb.GenerateResponse) -> None:
        self.token_ids += response.token_ids
        self.text += response.text
        self.logprobs += response.logprobs
        self.prompt_logprobs += response.prompt_logprobs
        if self.first_at is None:
            self.first_at = self.clock()
        if response.HasField("finish"):
            self.finish = response.finish
            self.ended_at = self.clock()


def reason(finish: pb.Finish) -> str:
    """The finish reason in lower case, without its prefix: "stop", "length"."""
    return pb.FinishReason.Name(finish.finish_reason).removeprefix("FINISH_REASON_").lower()


def as_object(answers: Sequence[Answer]) -> Mapping[str, Any]:
    """What `--json` prints: the finished answer, or "choices" of several.  Scripts rely on these keys."""
    objects = [_as_object(answer, _finish(answer)) for answer in answers]
    return objects[0] if len(objects) == 1 else {"choices": objects}


def _finish(answer: Answer) -> pb.Finish:
    # The client does not end before each choice has one.
    assert answer.finish is not None
    return answer.finish


def _logprob(one: pb.TokenLogprobs) -> Mapping[str, Any]:
    top = [{"token_id": it.token_id, "token": it.token, "logprob": it.logprob} for it in one.top]
    return {"token_id": one.token_id, "token": one.token, "logprob": one.logprob, "top": top}


def _as_object(answer: Answer, finish: pb.Finish) -> Mapping[str, Any]:
    stats = finish.speculation
    lists = {"logprobs": answer.logprobs, "prompt_logprobs": answer.prompt_logprobs}
    return {
        "token_ids": answer.token_ids,
        "text": answer.text,
        **{name: [_logprob(one) for one in given] for name, given in lists.items() if given},
        "finish_reason": reason(finish),
        "seed": finish.seed,
        "usage": {
            "prompt_tokens": finish.usage.prompt_tokens,
            "completion_tokens": finish.usage.completion_tokens,
        },
        "speculation": {
            "schedule": stats.schedule,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "verify_passes": stats.verify_passes,
            "acceptance_length": stats.acceptance_length,
            "hits": stats.hits,
            "waited_seconds": stats.waited_seconds,
            "positions": [{"drafted": at.drafted, "accepted": at.accepted} for at in stats.positions],
        },
    }


def statistics(answer: Answer) -> str:
    """One line: how fast, how many tokens per pass, how many of them were drafted, how often a draft was there."""
    finish = _finish(answer)
    tokens, stats = finish.usage.completion_tokens, finish.speculation
    seconds = (answer.ended_at or answer.started_at) - answer.started_at
    first = (answer.first_at or answer.started_at) - answer.started_at
    rate = tokens / seconds if seconds else 0.0
    share = stats.accepted / tokens if tokens else 0.0
    hits = f"hit rate {stats.hits / stats.verify_passes:.0%} · " if stats.drafted and stats.verify_passes else ""
    return (
        f"{tokens} tokens in {seconds:.1f} s, {rate:.1f} tokens/s (first after {first:.1f} s) · "
        f"acceptance length {stats.acceptance_length:.2f} · {share:.0%} drafted · {hits}"
        f"{stats.schedule} · {reason(finish)} · seed {finish.seed}"
    )


def write(text: str) -> None:
    """A piece of an answer, at once."""
    sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def end_line(text: str) -> None:
    """Let what comes after `text` begin a line of its own."""
    if text and not text.endswith("\n"):
        write("\n")


def note(message: str) -> None:
    """A line on stderr."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(message, markup=False, style="dim" if console.is_terminal else "")


def error(message: str) -> None:
    """An error, as one line on stderr."""
    sys.stderr.write(f"paceline: {' '.join(message.split())}\n")
    sys.stderr.flush()


class Progress:
    """What is being done, for whoever waits: a spinner on a terminal, otherwise a line per step and ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._step, self._quiet_until = "", 0.0

    def __call__(self, message: str) -> None:
        if not self._console.is_terminal:
            self._line(message)
            return
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        self._status.update(Text(message))

    def _line(self, message: str) -> None:
        # What differs in its numbers only is the same step, further on.
        step, now = _NUMBER.sub("", message), self._clock()
        if step != self._step or now >= self._quiet_until:
            self._step, self._quiet_until = step, now + 10
            self._console.print(message, markup=False)

    def clear(self) -> None:
        """Nothing is being waited for any more."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.clear()


def ask(prompt: str) -> str | None:
    """A line from the user, or None at the end of input.  Raises KeyboardInterrupt on Ctrl-C."""
    interactive = sys.stdin.isatty()
    if interactive:
        # Importing it gives input() history and editing; not every Python has it.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    try:
        return input(prompt if interactive else "")
    except EOFError:
        _end_line(interactive)
        return None
    except KeyboardInterrupt:
        _end_line(interactive)
        raise


def _end_line(interactive: bool) -> None:
    if interactive:
        write("\n")
