"""metrics.jsonl: one line for each step of our own trainer, written by rank 0."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from model_check.record.typed import from_json, to_json

_HEAD_BYTES = 16 << 10
_TAIL_BYTES = 128 << 10


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The numbers of one step."""

    step: int = 0  # from 0
    loss: float = math.nan  # mean over all ranks
    lr: float = math.nan  # learning rate
    grad_norm: float = math.nan  # before clipping
    tokens_per_s: float = 0.0  # of all ranks together
    mfu: float | None = None  # fraction of the chips' peak; None: the peak is not known
    step_s: float = 0.0  # seconds that it took
    data_wait_s: float = 0.0  # seconds of it without data
    memory_gib: float = 0.0  # of this rank's device, at its peak
    tokens: int = 0  # of all steps so far
    skipped: bool = False  # the step changed no weight
    val_loss: float | None = None  # after a step that evaluated
    # The host waits after the step that saved, the device in the step after it.
    save_pause_s: float | None = None  # seconds that training waited for a checkpoint

    def record(self) -> dict[str, Any]:
        """The line of the file: without `val_loss` and `save_pause_s` where there are none."""
        step = StepMetrics(**{field.name: getattr(self, field.name) for field in fields(StepMetrics)})
        return {**to_json(step), "mfu": self.mfu}


def read_metrics(path: Path, *, all_steps: bool = False) -> tuple[StepMetrics, ...]:
    """In order: of a long file the first steps and the newest ones, or all steps."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            if all_steps or size <= _HEAD_BYTES + _TAIL_BYTES:
                return _records(file.read())
            head = file.read(_HEAD_BYTES)
            file.seek(size - _TAIL_BYTES)
            tail = file.read()
    except OSError:
        return ()
    # Both cuts go through a line.
    return (*_records(head[: head.rfind(b"\n")]), *_records(tail[tail.find(b"\n") :]))


def _records(data: bytes) -> tuple[StepMetrics, ...]:
    found = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a killed writer
        if isinstance(record, dict):
            found.append(from_json(StepMetrics, record))
    return tuple(found)
