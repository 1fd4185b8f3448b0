"""A guest's notes about itself: losses, weights, compiled graphs and CPU time. It knows nothing of Model Check.

Each rank writes its notes to a file in the folder named by GUESTBOOK, outside the guest's working folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

STEPS = int(os.environ.get("GUEST_STEPS", "24"))
WARM_UP = int(os.environ.get("GUEST_WARM_UP", "4"))


class Guestbook:
    """The notes of one rank."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self._warm = _cpu_seconds()

    def step(self, loss: Any) -> None:
        """Call after each step. The CPU clock starts after the warm-up steps."""
        self.losses.append(float(loss).hex())
        if len(self.losses) == WARM_UP:
            self._warm = _cpu_seconds()

    def close(self, weights: Mapping[str, Any], **more: Any) -> None:
        """Writes the notes. Call it after the last step and before anything is saved."""
        cpu_s = _cpu_seconds() - self._warm
        dynamo = sys.modules.get("torch._dynamo.utils")
        counters = dynamo.counters if dynamo is not None else {}
        notes = {
            "losses": self.losses,
            "weights": digest(weights),
            "graphs": counters["stats"]["unique_graphs"] if counters else 0,
            "graph_breaks": sum(counters["graph_break"].values()) if counters else 0,
            "cpu_s": cpu_s,
            **more,
        }
        folder = os.environ.get("GUESTBOOK")
        if folder:
            Path(folder, f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(notes))
        else:
            print(json.dumps(notes), flush=True)


def _cpu_seconds() -> float:
    """User and system time of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def digest(weights: Mapping[str, Any]) -> str:
    """A hash of the weights' exact bits."""
    found = hashlib.sha256()
    for name, value in weights.items():
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            found.update(name.encode())
            found.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
