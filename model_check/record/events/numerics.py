"""Events about numbers: steps that are not finite, trends of loss and gradients, replicas that differ."""

from __future__ import annotations

from dataclasses import dataclass

from model_check.record.events.base import Event


@dataclass(frozen=True, kw_only=True)
class GuardFailed(Event, kind="guard_failed"):
    """The guard ended itself: from here on the numbers of this rank are not watched."""

    error: str = ""
    traceback: str = ""
