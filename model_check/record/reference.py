"""Renders docs/run-directory.md from the records: `python -m model_check.record.reference docs/run-directory.md`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from model_check.record.environment import Environment
from model_check.record.events import KINDS, Event
from model_check.record.flight import FlightEntry
from model_check.record.metrics import StepMetrics
from model_check.record.ring import Crumb
from model_check.record.run_plan import RunPlan
from model_check.record.stacks import ProcessStacks
from model_check.record.verdict import Verdict

_INTRODUCTION = """\
# The run directory

This page is generated from the records: `python -m model_check.record.reference docs/run-directory.md`.

All that a run leaves is in one directory: `.outputs/<run-id>/`, or the one that `--run-dir` names. It is the only
connection between the processes that write and those that read, so it can be copied and examined on another machine.
A reader ignores keys and kinds of events that it does not know, and takes the default (in the tables: behind `=`) of a
key that is missing. Times called `t` are seconds of CLOCK_MONOTONIC, which all processes of a host share.

## Files

| file | what it holds |
|---|---|"""

_FILES = {
    "config.json": "the resolved configuration of `train`, each value with where it came from",
    "environment.json": "[versions, GPUs, cores, memory and variables](#environment), without secrets",
    "plan.json": "what the memory of a rank was [planned](#plan) to be, where its GPU is known",
    "blackbox/rank-00000.ring": "the newest records of a rank, in a memory-mapped file that survives SIGKILL",
    "blackbox/rank-00000.sock": "the socket at which a rank answers while its main thread is stuck",
    "events/rank-00000.jsonl": "what happened in a rank: one [event](#events) a line",
    "events/supervisor.jsonl": "what the launcher saw from outside: one [event](#events) a line",
    "metrics.jsonl": "the [numbers](#metrics) of a step of `train` a line",
    "history/rank-00000": "the phases of every step, older parts coarsened",
    "stacks/rank-00000.1.json": "the [stacks](#stacks) of a rank, taken from outside; the number counts the rounds",
    "stacks/rank-00000.fault.txt": "what faulthandler wrote when the rank crashed",
    "flight/rank-00000.1.json": "a dump of torch's [flight recorder](#flight-recorder)",
    "dumps/": "tensors of a step with bad numbers",
    "verdict.json": "the [verdict](#verdict), rewritten while the run lives",
    "report.html": "the page of the run",
    "logs": "a link to the raw logs of the ranks",
    "checkpoints": "a link to the folder that the run saves into",
    "attempts/1/": "the evidence of an earlier attempt in the same directory",
    "run.lock": "held by the launcher, so that no second one writes here",
}

_FIELD = re.compile(r"^    (?P<name>[a-z]\w*): (?P<type>.+?)(?: = (?P<default>.+?))?(?:  # (?P<comment>.+))?$")


def render_reference() -> str:
    """The whole page."""
    parts = [_INTRODUCTION, *(f"| `{name}` | {meaning} |" for name, meaning in _FILES.items()), ""]
    for title, record in (
        ("Environment", Environment),
        ("Plan", RunPlan),
        ("Ring", Crumb),
        ("Stacks", ProcessStacks),
        ("Flight recorder", FlightEntry),
        ("Metrics", StepMetrics),
        ("Verdict", Verdict),
    ):
        parts += [f"## {title}", "", *_record(record)]
    parts += ["## Events", "", "Each line has the kind in `event`, and:", "", *_table(Event)]
    for kind in sorted(KINDS):
        parts += [f"### `{kind}`", "", *_record(KINDS[kind])]
    return "\n".join(parts)


def _record(record: type[Any]) -> Iterator[str]:
    """What a record is for and its fields, and the same of the records inside it."""
    yield from (inspect.getdoc(record) or "", "")
    yield from _table(record)
    for inner in dict.fromkeys(inner for hint in _own_hints(record) for inner in _records_in(hint)):
        yield from (f"`{inner.__name__}`: {inspect.getdoc(inner)}", "")
        yield from _table(inner)


def _lineage(record: type[Any]) -> list[type[Any]]:
    """The record and the records that it extends; what every event has stands once, at the head of the events."""
    return [cls for cls in record.__mro__[::-1] if is_dataclass(cls) and (cls is not Event or record is Event)]


def _own_hints(record: type[Any]) -> list[Any]:
    hints = get_type_hints(record)
    return [hints[name] for part in _lineage(record) for name in part.__annotations__]


def _records_in(hint: Any) -> Iterator[type[Any]]:
    if is_dataclass(hint) and isinstance(hint, type):
        yield hint
        for inner in _own_hints(hint):
            yield from _records_in(inner)
    for argument in get_args(hint):
        yield from _records_in(argument)


def _choices(hint: Any) -> list[str]:
    """The values of an enumeration."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for argument in get_args(hint) for choice in _choices(argument)]


def _table(record: type[Any]) -> list[str]:
    """The fields as they stand in the source, with the comments behind them."""
    rows = []
    hints = get_type_hints(record)
    source = [(part, line) for part in _lineage(record) for line in inspect.getsource(part).splitlines()]
    for part, line in source:
        field = _FIELD.match(line)
        if field is not None and field["name"] in part.__annotations__ and "ClassVar" not in field["type"]:
            default = field["default"] if field["default"] and not field["default"].startswith("field(") else ""
            kind = (field["type"] + (f" = {default}" if default else "")).replace("|", "\\|")
            choices = ", ".join(f"`{choice}`" for choice in _choices(hints[field["name"]]))
            meaning = "; ".join(filter(None, (field["comment"], choices)))
            rows.append(f"| `{field['name']}` | `{kind}` | {meaning} |")
    return ["| field | type | meaning |", "|---|---|---|", *rows, ""] if rows else []


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_reference(), encoding="utf-8")
