"""The last lines of a run: what came of it and where everything is."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from model_check.cli.supervision import short
from model_check.record import RunDir, read_jsonl

# The first steps compile and warm up; they are left out of the speed, never out of the loss.
WARMUP_STEPS = 3


def summary_lines(
    run_dir: RunDir, log_dir: Path, *, outcome: str = "completed", entropy_floor: float | None = None
) -> list[str]:
    """Final loss, speed, and the two folders a person needs next."""
    records = read_jsonl(run_dir.metrics).records
    lines = []
    if records:
        word = {"completed": "done", "interrupted": "stopped"}.get(outcome, outcome)
        lines.append(f"{word}: {_result(records, entropy_floor)}")
    lines.append(f"run directory  {short(run_dir.root)}")
    lines.append(f"logs           {log_dir}")
    return lines


def _result(records: list[dict[str, Any]], entropy_floor: float | None) -> str:
    last = records[-1]
    steady = records[WARMUP_STEPS:] or records
    speed = statistics.median(r["tokens_per_s"] for r in steady)
    steps = last["step"] + 1
    parts = [f"{steps} step{'s' if steps != 1 else ''}", f"final loss {float(last['loss']):.4f}"]
    if entropy_floor is not None:
        parts[-1] += f" (floor {entropy_floor:.4f})"
    parts.append(f"{speed:,.0f} tokens/s")
    mfu = [r["mfu"] for r in steady if r.get("mfu")]
    if mfu:
        parts.append(f"MFU {statistics.median(mfu):.1%}")
    parts.append(f"peak {max(r['memory_gib'] for r in records):.1f} GiB")
    return ", ".join(parts)
