"""The twelve checkpoints of a start: their names, how ranks leave them in their events, and who is where.

A rank appends `{"event": "checkpoint_mark", "number": 5, "name": "Model created"}` when it has passed one. One
sentence then describes a start that got stuck: "rank 0 passed 9, rank 1 is still before 9 (metrics writer), 34 s".

The names are those of the earlier guides, because people look for them in their logs. Evidence names what runs here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from model_check.record.events import Event, read_event
from model_check.record.events.process import StartMark
from model_check.record.files import read_jsonl
from model_check.record.paths import RunDir

CHECKPOINTS = (
    "Script started",
    "Args parsed",
    "Logs directory ready",
    "Tokenizer loaded",
    "Model created",
    "LLMModule ready",
    "DataModule ready",
    "Accelerator configured",
    "WandbLogger ready",
    "MemoryLoggingCallback ready",
    "Trainer ready",
    "Training finished",
)
_COMPONENTS = (
    "start of the process",
    "configuration",
    "import of torch, run directory",
    "tokenizer, data cache",
    "process group, model",
    "optimizer, training step",
    "data loader",
    "checkpoint to resume from, checkpoint saver",
    "metrics writer",
    "memory marks",
    "first step",
    "training",
)
START_IS_OVER = 11


def name_of(number: int) -> str:
    return CHECKPOINTS[number - 1]


def component_of(number: int) -> str:
    """What a rank does between the checkpoint before and this one."""
    return _COMPONENTS[number - 1]


def last_passed(events: Iterable[Event]) -> StartMark | None:
    """From a rank's events; a restarted rank begins again at 1."""
    marks = [e for e in events if isinstance(e, StartMark) and 1 <= e.number <= len(CHECKPOINTS)]
    return marks[-1] if marks else None


def read_start_marks(run_dir: RunDir) -> dict[int, StartMark]:
    """The last checkpoint of every rank that left one."""
    marks: dict[int, StartMark] = {}
    for path in sorted(run_dir.events_dir.glob("rank-*.jsonl")):
        number = path.stem.removeprefix("rank-")
        passed = last_passed(map(read_event, read_jsonl(path).records)) if number.isdigit() else None
        if passed is not None:
            marks[int(number)] = passed
    return marks


def who_is_where(marks: Mapping[int, StartMark], now: float) -> str | None:
    """One sentence; None if no rank left a mark, or if the start is over on all ranks."""
    if not marks or all(passed.number >= START_IS_OVER for passed in marks.values()):
        return None
    groups: dict[int, list[int]] = {}
    for rank, passed in sorted(marks.items()):
        groups.setdefault(passed.number, []).append(rank)
    furthest = max(groups)
    parts = []
    if len(groups) > 1 or furthest >= START_IS_OVER:
        parts.append(f"{_ranks(groups[furthest])} passed {furthest}")
    for number in sorted(groups, reverse=True):
        if number >= START_IS_OVER or (number == furthest and len(groups) > 1):
            continue
        ranks = groups[number]
        waited = now - max(marks[rank].t for rank in ranks)
        are = "is" if len(ranks) == 1 else "are"
        parts.append(
            f"{_ranks(ranks)} {are} still before {number + 1} ({component_of(number + 1)}), {max(0, waited):.0f} s"
        )
    return ", ".join(parts)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def start_table(run_dir: RunDir) -> list[str]:
    """The sentence and one row per rank for a start that did not finish; empty if it did."""
    marks = read_start_marks(run_dir)
    seen = [*map(read_event, read_jsonl(run_dir.supervisor_events).records), *marks.values()]
    now = max((event.t for event in seen), default=0.0)
    sentence = who_is_where(marks, now)
    if sentence is None:
        return []
    return [f"start: {sentence}", *(_row(rank, passed) for rank, passed in sorted(marks.items()))]


def _row(rank: int, passed: StartMark) -> str:
    off = f" (off: {passed.off})" if passed.off else ""
    return f"  rank {rank}: CHECKPOINT {passed.number}: {name_of(passed.number)}{off}"
