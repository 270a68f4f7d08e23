"""What the gateway needs of a cell; tests put something smaller in its place."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from paceline.actors.values import Delta, Request, Speculation


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a cell serves.  speculation, default_max_tokens: what a request gets that does not choose for itself."""

    target: str
    drafters: tuple[str, ...]
    dtype: str
    context_length: int
    vocab_size: int
    speculation: Speculation
    default_max_tokens: int = 2048


class Backend(Protocol):
    """Runs checked requests."""

    model: ModelInfo

    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The deltas of a request; the last one holds its finish.  Closing the generator early cancels the request.

        Raises BackendError when the cell is gone.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """End a request; one that is not there any more is fine."""
        ...


class BackendError(RuntimeError):
    """The cell cannot serve; the request is not to blame."""


class CellError(RuntimeError):
    """The cell could not be started; nothing of it is left."""
