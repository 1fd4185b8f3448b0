"""Events about exceptions and exits."""

from __future__ import annotations

from dataclasses import dataclass

from model_check.record.events.base import Event


@dataclass(frozen=True, kw_only=True)
class Fork(Event, kind="fork"):
    """The script forked a child."""

    child_pid: int = 0
