"""The last lines of a run: what came of it and where everything is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from model_check.cli.supervision import short
from model_check.record import RunDir
from model_check.record.metrics import StepMetrics, read_metrics

# The first steps compile and warm up; they are left out of the speed, never out of the loss.
WARMUP_STEPS = 3


def summary_lines(
    run_dir: RunDir, log_dir: Path, *, outcome: str = "completed", entropy_floor: float | None = None
) -> list[str]:
    """Final loss, speed, and the two folders a person needs next."""
    records = read_metrics(run_dir.metrics, all_steps=True)
    lines = []
    if records:
        word = {"completed": "done", "interrupted": "stopped"}.get(outcome, outcome)
        lines.append(f"{word}: {_result(records, entropy_floor)}")
    lines.append(f"run directory  {short(run_dir.root)}")
    lines.append(f"logs           {log_dir}")
    return lines


def _result(records: Sequence[StepMetrics], entropy_floor: float | None) -> str:
    last = records[-1]
    steady = records[WARMUP_STEPS:] or records
    speed = statistics.median(step.tokens_per_s for step in steady)
    steps = last.step + 1
    parts = [f"{steps} step{'s' if steps != 1 else ''}", f"final loss {last.loss:.4f}"]
    if entropy_floor is not None:
        parts[-1] += f" (floor {entropy_floor:.4f})"
    parts.append(f"{speed:,.0f} tokens/s")
    mfu = [step.mfu for step in steady if step.mfu]
    if mfu:
        parts.append(f"MFU {statistics.median(mfu):.1%}")
    parts.append(f"peak {max(step.memory_gib for step in records):.1f} GiB")
    return ", ".join(parts)
