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
        """Whether it or one of its children computed for 50 ms or moved a megabyte since the last sample."""
        cpu_s = seen.cpu_s + sum(child.cpu_s for child in seen.children)
        active = cpu_s - self.cpu_s > _ACTIVE_CPU_S or seen.io_bytes - self.io_bytes > _ACTIVE_BYTES
        self.cpu_s, self.io_bytes = cpu_s, seen.io_bytes
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
