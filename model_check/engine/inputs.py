"""What a step was given, kept until its numbers are known to be good: with it the step can be run again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomState:
    """Every generator of this process. Reading the device's does not wait for the device."""

    device: torch.device
    python: Any
    numpy: Any
    host: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


@dataclass(frozen=True)
class StepInputs:
    """One step's micro-batches, learning rate and random state. Batches are kept by reference: they cost nothing."""

    step: int
    rate: float
    micro_batches: tuple[Any, ...]
    random: RandomState
