"""Number formats: what parameters are stored in, what products run in, and how fp16 losses are scaled.

fp8             as bf16 on a GPU, with the products of the blocks and the output projection in fp8 (see models.fp8)
bf16 on a GPU   parameters bf16, with the low half of an fp32 master beside them (see split_adamw)
bf16 on a CPU   parameters fp32, products bf16 through autocast
fp16            parameters fp32, products fp16 through autocast, the loss scaled
fp32            fp32 throughout

Sharded (fsdp, hsdp), parameters are always stored in fp32: the shards are the master. With fsdp.use_mixed_precision
they are gathered in the half format and products run in it without autocast; otherwise gathered in fp32, with autocast.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
BACKOFF = 0.5
# What a run without loss scaling leaves in its checkpoints: scale and good steps.
_NEVER_IN_USE = (1.0, 0)


@dataclass(frozen=True)
class Precision:
    """How one run computes."""

    name: str
    parameter_dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    device_type: str
    gather_dtype: torch.dtype | None = None

    @classmethod
    def choose(cls, name: str, device: torch.device) -> Precision:
        """For parameters that every rank holds whole."""
        kind = device.type
        if name == "fp8" or (name == "bf16" and kind == "cuda"):
            return cls(name, torch.bfloat16, None, kind)
        if name in ("bf16", "fp16"):
            return cls(name, torch.float32, torch.bfloat16 if name == "bf16" else torch.float16, kind)
        return cls(name, torch.float32, None, kind)

    @classmethod
    def choose_sharded(cls, name: str, device: torch.device, *, mixed: bool) -> Precision:
        """For parameters in shards; `mixed` is fsdp.use_mixed_precision."""
        half = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(name)
        return cls(name, torch.float32, None if mixed else half, device.type, half if mixed else None)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)


class LossScale:
    """Dynamic loss scaling that lives on the device: finding an overflow costs no host synchronisation."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = torch.tensor(INITIAL_SCALE if enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.scale.to(loss.dtype) if self.enabled else loss

    def update(self, overflowed: torch.Tensor) -> None:
        """Halves the scale after an overflow, doubles it after GROWTH_INTERVAL good steps."""
        if self.enabled:
            torch._amp_update_scale_(self.scale, self._good_steps, overflowed, 2.0, BACKOFF, GROWTH_INTERVAL)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale.item(), "good_steps": self._good_steps.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on with a scale that was in use; one of another number format means nothing here."""
        if not self.enabled or (state["scale"], state["good_steps"]) == _NEVER_IN_USE:
            return
        self.scale.fill_(state["scale"])
        self._good_steps.fill_(int(state["good_steps"]))
