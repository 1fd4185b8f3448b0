"""Events about processes and the job: joining, groups, threads, starts, signals, stalls, the job's begin and end."""

from __future__ import annotations

from dataclasses import dataclass

from model_check.record.events.base import Event


@dataclass(frozen=True, kw_only=True)
class GroupJoined(Event, kind="group"):
    """A process group that this rank takes part in."""

    name: str = ""  # as the ring's records name it
    ranks: tuple[int, ...] = ()
    torch_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Threads(Event, kind="threads"):
    """How many threads torch computes with in this rank."""

    compute: int = 0
