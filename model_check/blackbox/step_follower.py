"""The hook for the room that checks a script's numbers: the black box tells it of every step and knows nothing more."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType


@dataclass
class StepFollower:
    """The module that is told. It is imported at the first step: it needs torch, which must be whole by then."""

    module: str = ""

    def load(self) -> ModuleType | None:
        return importlib.import_module(self.module) if self.module else None

    @property
    def loaded(self) -> ModuleType | None:
        """None until the first step, and where nobody follows."""
        return sys.modules.get(self.module)


FOLLOWER = StepFollower()
