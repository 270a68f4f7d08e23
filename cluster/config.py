"""What a cell is made of, checked once, at start."""

from __future__ import annotations

from typing import Annotated, Literal

from paceline.actors.schedules import MAX_K, SCHEDULES
from pydantic import BaseModel, ConfigDict, Field, field_validator

NGRAM = "ngram"
NONE = "none"


class CellConfig(BaseModel):
    """One verifier, one drafter, and how they work.

    target: a Hugging Face directory, a .gguf file, a hub id or an alias.  drafter: the same, or "ngram" (prompt
    lookup), or "none".  schedule, k: what a request gets that does not choose for itself.
    dtype: "auto" is bfloat16 where the device computes in it, else float32.
    kv_tokens: cached positions over all sessions, in each actor.
    link_frames: drafts travel through host memory (gloo) or device memory (NCCL); "auto" is the device's own memory.
    link_deadline: seconds of silence after which a drafter counts as lost.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = "smollm2-135m"
    drafter: str = NGRAM
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    schedule: str = "amusd"
    k: Annotated[int, Field(ge=1, le=MAX_K)] = 4
    kv_tokens: Annotated[int, Field(ge=256)] = 16384
    max_sessions: Annotated[int, Field(ge=1, le=1024)] = 16
    max_queue: Annotated[int, Field(ge=0)] = 256
    link_frames: Literal["auto", "host", "device"] = "auto"
    link_deadline: Annotated[float, Field(gt=0)] = 3.0
    start_timeout: Annotated[float, Field(gt=0)] = 300.0

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, name: str) -> str:
        if name not in SCHEDULES:
            raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
        return name
