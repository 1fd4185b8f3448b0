"""plan.json of a run: what the plan expected a rank to need, and what would make it need less."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedMemory:
    """Of the device."""

    peak_gib: float | None = None
    peak_moment: str = ""  # the part of the step


@dataclass(frozen=True)
class PlannedRemedy:
    """One change, and what it saves on each rank."""

    flags: str = ""
    saves_gib: float = 0.0


@dataclass(frozen=True)
class RunPlan:
    """What the rules read; the file also has all that `model-check plan --json` prints of one option."""

    memory: PlannedMemory = PlannedMemory()
    remedies: tuple[PlannedRemedy, ...] = ()  # the least harmful first
