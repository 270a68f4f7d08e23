"""The command line with a scripted cell in place of the real one: ``scripted_cell.py BEHAVIOUR ARGUMENTS...``."""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import AsyncIterator
from typing import Any

from paceline.actors.trace import Span
from paceline.actors.values import Delta, Request
from paceline.cluster.backend import CellError
from paceline.cluster.cli import main
from paceline.cluster.models import ModelError
from scripted import ByteCodec, ScriptedBackend, endless, hello

BEHAVIOUR = sys.argv.pop(1)


async def told(request: Request) -> AsyncIterator[Delta]:
    """An endless answer that tells when it has begun, which is when a Ctrl-C has something to end."""
    sys.stderr.write(f"answering {request.id}\n")
    async for delta in endless(request):
        yield delta


class Cell:
    """Tells on stderr what is done with it."""

    def __init__(self) -> None:
        self.backend, self.codec = ScriptedBackend(told if BEHAVIOUR == "endless" else hello), ByteCodec()

    @classmethod
    def start(cls, config: Any, progress: Any) -> Cell:
        progress(f"starting {config.target} with {' and '.join(config.drafters) or 'none'}")
        match BEHAVIOUR:
            case "no_bad" if config.drafters == ("bad",):
                raise ModelError("bad is no model")
            case "bad_model":
                raise ModelError(f"{config.target} is no model")
            case "bad_cell":
                raise CellError("the verifier\ndied")
            case "slow_start":
                signal.pause()
        return cls()

    async def watch_drafters(self) -> AsyncIterator[frozenset[str]]:
        yield frozenset({"drafter-0 (ngram)"})

    def status(self) -> dict[str, Any]:
        return {"verifier": {}}

    def teach(self, prompt: Any, continuation: Any, step_seconds: float) -> None:
        pass

    def trace(self) -> list[Span]:
        return [Span("verifier", "verify", 1.0, 2.0, {"sessions": 1, "nodes": 0, "prompt": 0})]

    def stop(self) -> None:
        cancelled = self.backend.cancelled.qsize()
        sys.stderr.write(f"cell stopped, {cancelled} of {len(self.backend.requests)} cancelled\n")


sys.modules["paceline.cluster.cell"] = types.SimpleNamespace(Cell=Cell)  # type: ignore[assignment]
main()
