"""The block of text that a rank prints when a step is not finite, as the earlier guides show it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

_WIDE, _NARROW = "=" * 80, "=" * 40
_TENSORS_SHOWN = 10
_VALUES_SHOWN = 5


@dataclass(frozen=True)
class BadTensor:
    """A tensor that is not finite: its whole shape, its first values, and how many of them are bad."""

    name: str
    shape: tuple[int, ...]
    values: tuple[float, ...]
    bad: int
    total: int

    @property
    def values_text(self) -> str:
        shown = [repr(_value(v)) for v in self.values[:_VALUES_SHOWN]]
        return f"[{', '.join(shown)}{', ...' if self.total > len(shown) else ''}]"


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return f"{value:.4g}"


def device_name(label: str) -> str:
    """`GPU 6` of the label `GPU6` (or `host:GPU6`)."""
    return re.sub(r"(?<=[A-Z])(?=\d+$)", " ", label.rpartition(":")[2])


def banner_lines(
    label: str,
    step: int,
    loss: float,
    grad_norm: float,
    gradients: Sequence[BadTensor],
    parameters: Sequence[BadTensor] = (),
    *,
    checkpoint: str | None = None,
    tensors: str | None = None,
) -> list[str]:
    """Everything a rank prints about a bad step, line by line."""
    names = [tensor.name for tensor in gradients]
    lines = [_WIDE, f"NaN GRADIENT DETECTED [{device_name(label)}]", _WIDE]
    lines += [f"Step: {step}", f"Loss: {loss:.4f}", f"Gradient Norm: {_norm(grad_norm)}", ""]
    lines += [_NARROW, "PROBLEMATIC TENSORS:", _NARROW]
    if parameters:
        lines += _group("Parameters with NaN", "Values", parameters)
    lines += _group("Gradients with NaN", "Grad values", gradients)
    shown = ", ".join(repr(name) for name in names[:_TENSORS_SHOWN])
    more = ", ..." if len(names) > _TENSORS_SHOWN else ""
    lines += ["", f"Total layers with NaN gradients: {len(names)}", f"Affected layers: [{shown}{more}]", _NARROW, ""]
    if checkpoint is not None:
        lines.append(f"Checkpoint saved: {checkpoint}")
    if tensors is not None:
        lines.append(f"Debug tensors saved: {tensors}")
    return lines


def _norm(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else str(value)


def _group(title: str, values: str, tensors: Sequence[BadTensor]) -> list[str]:
    lines = [f"⚠️  {title} ({len(tensors)} layers):"]
    for tensor in tensors[:_TENSORS_SHOWN]:
        lines += [
            f"  • {tensor.name} (shape: torch.Size({list(tensor.shape)}))",
            f"    {values}: {tensor.values_text}",
            f"    NaN count: {tensor.bad}/{tensor.total}",
        ]
    if len(tensors) > _TENSORS_SHOWN:
        lines.append(f"  … and {len(tensors) - _TENSORS_SHOWN} more")
    return lines
