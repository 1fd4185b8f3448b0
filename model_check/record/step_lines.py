"""The line that a rank prints for a step, in the format of the earlier guides."""

from __future__ import annotations


def step_line(
    label: str,
    step: int,
    max_steps: int,
    loss: float,
    lr: float,
    grad_norm: float,
    eta_s: float | None,
    *,
    lowered_scale: float | None = None,
) -> str:
    """`[GPU0] Step [0/100] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: 2.7565 | ETA: 5:30`.

    `lowered_scale`: the loss scale that the run goes on with, where this step overflowed and was skipped. It stands
    behind the others, whose order is read by machine.
    """
    skipped = "" if lowered_scale is None else f" | Skipped: overflow, loss scale down to {lowered_scale:.15g}"
    return (
        f"[{label}] Step [{step}/{max_steps}] | Loss: {loss:.4f} | LR: {lr:.2e} | "
        f"Grad Norm: {grad_norm:.4f} | ETA: {clock(eta_s)}{skipped}"
    )


def clock(seconds: float | None) -> str:
    """5:30, 1:02:03, or 2d 3:04:05; `?` where it is not known."""
    if seconds is None or not 0 <= seconds < float("inf"):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
