"""What a cell is made of, checked once, at start."""

from __future__ import annotations

from typing import Annotated, Literal

from paceline.actors.schedules import AUTO, MAX_BUDGET, MAX_FANOUT, MAX_K, MAX_WIDTH, SCHEDULES
from paceline.actors.values import Speculation
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

NGRAM, INT8, NONE = "ngram", "int8", "none"
ORACLE, FOREIGN = "oracle:", "foreign:"
MAX_DRAFTERS = 16

_DEFAULT = Speculation()


class CellConfig(BaseModel):
    """One verifier, its drafters, and how they work.

    target: a Hugging Face directory, a .gguf file, a hub id or an alias.
    drafters: each the same, or "ngram" (prompt lookup), or "int8" (the target's own weights in int8), or "oracle:..."
    (synthetic, for measurements), or "foreign:" and a model with another tokenizer; ("none",) is no drafter.
    drafters_per_session: how many drafters grow one request's draft together; prompt lookup comes on top.
    drafter_vocab: the token ids that the heads of model drafters keep, a file of them or how many; see vocab.head_ids.
    schedule, k, fanout, width, budget: what a request gets that does not choose for itself.
    dtype: "auto" is bfloat16 where the device computes in it, else float32.
    kv_tokens: cached positions over all sessions, in each actor.
    default_max_tokens: the most tokens of a request that names no max_tokens; the context bounds it too.
    cuda_graphs: record passes of a fixed shape on GPUs and launch them as one; off, each kernel is launched by itself.
    link_frames: drafts travel through host memory (gloo) or device memory (NCCL); "auto" is the device's own memory.
    link_deadline: seconds of silence after which a drafter counts as lost.
    link_delay: seconds by which every message between verifier and drafters is held up, for measurements.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = "smollm2-135m"
    drafters: Annotated[tuple[str, ...], Field(max_length=MAX_DRAFTERS)] = (NGRAM,)
    drafters_per_session: Annotated[int, Field(ge=1, le=MAX_DRAFTERS)] = 1
    drafter_vocab: Annotated[int, Field(ge=1)] | Annotated[str, Field(min_length=1)] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    schedule: str = _DEFAULT.schedule
    k: Annotated[int, Field(ge=1, le=MAX_K)] = _DEFAULT.k
    fanout: Annotated[int, Field(ge=1, le=MAX_FANOUT)] = _DEFAULT.fanout
    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)] = _DEFAULT.width
    budget: Annotated[int, Field(ge=1, le=MAX_BUDGET)] = _DEFAULT.budget
    kv_tokens: Annotated[int, Field(ge=256)] = 16384
    default_max_tokens: Annotated[int, Field(ge=1)] = 2048
    cuda_graphs: bool = True
    max_sessions: Annotated[int, Field(ge=1, le=1024)] = 16
    max_queue: Annotated[int, Field(ge=0)] = 256
    link_frames: Literal["auto", "host", "device"] = "auto"
    link_deadline: Annotated[float, Field(gt=0)] = 3.0
    link_delay: Annotated[float, Field(ge=0, le=10)] = 0.0
    start_timeout: Annotated[float, Field(gt=0)] = 300.0

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, name: str) -> str:
        if name not in (*SCHEDULES, AUTO):
            raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join((*SCHEDULES, AUTO))}")
        return name

    @field_validator("drafter_vocab", mode="before")
    @classmethod
    def _a_number_where_it_looks_like_one(cls, wanted: object) -> object:
        return int(wanted) if isinstance(wanted, str) and wanted.isdecimal() else wanted

    @field_validator("drafter_vocab")
    @classmethod
    def _not_of_a_foreign_drafter(cls, wanted: int | str | None, info: ValidationInfo) -> int | str | None:
        foreign = [name for name in info.data.get("drafters", ()) if name.startswith(FOREIGN)]
        if foreign and wanted is not None:
            raise ValueError(f"{foreign[0]} guesses what both vocabularies have, so its head is not to be chosen")
        return wanted

    @field_validator("drafters")
    @classmethod
    def _known_drafters(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if NONE in names:
            if len(names) > 1:
                raise ValueError(f'"{NONE}" means no drafter at all; leave it out, or the others')
            return ()
        if "" in names:
            raise ValueError("a drafter's name is empty; give a model, or ngram")
        for name in names:
            if name.startswith(ORACLE):
                # Imported here, since it brings torch along, which a client of a server never needs.
                from paceline.actors.oracle import parse_oracle

                parse_oracle(name)
            if name.startswith(FOREIGN):
                _check_foreign(name.removeprefix(FOREIGN))
        return names

    @property
    def speculation(self) -> Speculation:
        """What a request gets that does not choose for itself; without a drafter there is nothing to wait for."""
        return Speculation(self.schedule if self.drafters else "plain", self.k, self.fanout, self.width, self.budget)


def _check_foreign(model: str) -> None:
    if model in ("", NGRAM, INT8, NONE) or model.startswith((ORACLE, FOREIGN)):
        raise ValueError(f'"{FOREIGN}" stands before a model that has another tokenizer than the target, got {model!r}')
