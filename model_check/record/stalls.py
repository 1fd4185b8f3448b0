"""How long a rank may show no progress before that counts as a stall, for the supervisor and for the rules."""

from __future__ import annotations

STALL_FLOOR_S = 5.0
_STALL_STEPS = 5.0


def stall_after_s(median_step_s: float | None, floor_s: float = STALL_FLOOR_S) -> float:
    return max(floor_s, _STALL_STEPS * (median_step_s or 0.0))
