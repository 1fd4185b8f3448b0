"""The supervisor's state: one watched rank, and one suspected stall."""

from __future__ import annotations

from dataclasses import dataclass

from model_check.record.process_sample import RankSample
from model_check.record.rank_exits import RankExit
from model_check.supervise.pulse import Pulse

_ACTIVE_CPU_S = 0.05
_ACTIVE_BYTES = 1 << 20


@dataclass
class Rank:
    """One watched process."""

    rank: int
    pid: int
    pulse: Pulse
    started_at: float
    exit: RankExit | None = None
    cpu_s: float = 0.0
    io_bytes: int = 0

    def was_active(self, seen: RankSample) -> bool:
        """Whether it or a child computed for 50 ms since the last sample, or moved a megabyte since it last did.

        Bytes add up: a save over a slow network moves less than a megabyte between two samples.
        """
        cpu_s = seen.cpu_s + sum(child.cpu_s for child in seen.children)
        has_moved = seen.io_bytes - self.io_bytes > _ACTIVE_BYTES
        active = cpu_s - self.cpu_s > _ACTIVE_CPU_S or has_moved
        self.cpu_s = cpu_s
        if has_moved:
            self.io_bytes = seen.io_bytes
        return active


@dataclass
class Stall:
    """A suspicion: since when nothing moved, and which evidence has been taken."""

    since: float
    threshold_s: float
    gathered_at: float
    rounds: int = 1
    examined: bool = False
    line_due: float = 0.0
    looks: int = 0
    looked_at: float = 0.0
