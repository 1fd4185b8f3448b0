"""The hook through which the black box tells another package of every step, without importing that package."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType


@dataclass
class StepFollower:
    """The name of the module to tell. It is imported only at the first step, because it needs torch fully imported."""

    module: str = ""

    def load(self) -> ModuleType | None:
        return importlib.import_module(self.module) if self.module else None

    @property
    def loaded(self) -> ModuleType | None:
        """None before the first step, and if no module follows."""
        return sys.modules.get(self.module)


FOLLOWER = StepFollower()
