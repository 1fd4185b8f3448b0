"""How large the numbers in a tensor are, and what passed through each module of a watched forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

CHECKED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a sharded tensor; asking about the whole would be a collective."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def real_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, outside any graph; of complex numbers both parts, as plain ones."""
    values = local_part(tensor).detach()
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def checkable(value: Any) -> bool:
    """A tensor that could hold NaN or infinity, with values that can be read here and now."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in CHECKED
        and value.layout == torch.strided
        and value.device.type != "meta"
        and local_part(value).numel() > 0
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Without a temporary of the tensor's size. A finite sum proves it; a sum may overflow, a magnitude cannot."""
    values = real_part(tensor)
    total = values.sum(dtype=torch.float64 if values.dtype == torch.float64 else torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(torch.linalg.vector_norm(values, math.inf)))


@dataclass(frozen=True)
class Range:
    """Largest magnitude and mean of the finite numbers, and the share of numbers that are finite."""

    absmax: float
    mean: float
    finite: float

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Range:
        values = real_part(tensor)
        absmax = float(torch.linalg.vector_norm(values, math.inf))
        if math.isfinite(absmax):
            return cls(absmax, _mean(values), 1.0)
        good = values[torch.isfinite(values)].float()
        if not good.numel():
            return cls(math.nan, math.nan, 0.0)
        return cls(float(good.abs().max()), _mean(good), good.numel() / values.numel())


def _mean(values: torch.Tensor) -> float:
    """Of finite numbers; their sum may leave the range of float32 although none of them does."""
    mean = float(values.mean(dtype=torch.float32))
    return mean if math.isfinite(mean) else float(values.mean(dtype=torch.float64))


@dataclass(frozen=True)
class ModuleRange:
    """One module that ran: what came in, what went out (None: nothing with a fraction)."""

    module: str
    input: Range | None
    output: Range | None

    def record(self) -> dict[str, Any]:
        return asdict(self)


def first_range(value: Any) -> Range | None:
    """Of the first tensor in whatever a module takes or returns."""
    if isinstance(value, torch.Tensor):
        return Range.of(value) if checkable(value) else None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for part in parts if (found := first_range(part)) is not None), None)


class ModuleTrail:
    """Which module runs now, and those that have run, in order. Works through hooks, so the model knows nothing."""

    def __init__(self) -> None:
        self.passed: list[ModuleRange] = []
        self._running: list[str] = []

    @property
    def current(self) -> str:
        return self._running[-1] if self._running else ""

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name)))
            handles.append(module.register_forward_hook(self._leave(name), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._running.append(name)

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._running and self._running[-1] == name:
                self._running.pop()
            with _disable_current_modes():
                self.passed.append(ModuleRange(name, first_range(args), first_range(output)))

        return leave
