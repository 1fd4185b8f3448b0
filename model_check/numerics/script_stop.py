"""A script that ends itself in the middle of a step, often because it has seen the bad number by itself."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from model_check.numerics.blame import Hit, is_alone
from model_check.numerics.loss_line import Place

_ANOMALY = re.compile(r"Function '(\w+)' returned nan values in its \d+th output")
_A_MOMENT_S = 2.0
_PAUSE_S = 0.001


@dataclass(frozen=True)
class Stop:
    """What is bad in the step in which the script ends itself."""

    step: int
    loss: float
    direction: Literal["forward", "backward"]
    place: Place | None
    hit: Callable[[], Hit]  # looks into it: may run the step once more
    grad_norm: float | None  # None: there is none
    own_bad: str = ""  # which gradient was, before any exchange
    spoils: bool = True  # its gradients are bad, or not known

    @property
    def known_at_once(self) -> bool:
        """That it is this rank's doing needs no second run."""
        return self.direction == "forward" or bool(self.own_bad) or is_alone()

    def preliminary(self) -> dict[str, Any]:
        """The body of an event, until more is known."""
        why = "inferred: the operation is not known: the rank ended before the step could be run once more"
        return {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "action": "stopped",
            "direction": self.direction,
            "cause": "MC401" if self.direction == "forward" else "MC402",
            "evidence": [why],
            "location": f"{self.place.file}:{self.place.line}" if self.place is not None else None,
            "spoils": self.spoils,
            "preliminary": True,
        }


def anomaly_in(said: str) -> str:
    """The operation in whose backward torch's own search for anomalies has found NaN, if that ends the script."""
    found = _ANOMALY.search(said)
    return found[1] if found is not None else ""


def devices_answer() -> bool:
    """Within a moment. One that has failed, or waits for a peer that is gone, is asked nothing more."""
    if not torch.cuda.is_initialized():
        return True
    until = time.monotonic() + _A_MOMENT_S
    try:
        stream = torch.cuda.current_stream()
        while not stream.query():
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE_S)
    except RuntimeError:  # what a kernel has done wrong shows in every later call
        return False
    return True
