"""Model Check trains LLaMA-style models on every GPU you have, and says why when a run breaks.

from model_check import observe, diagnose                                                           any PyTorch script
from model_check import load_config, validate_config, DDPTrainer, FSDPTrainer, SimpleModel          our trainer
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model_check.api import diagnose, observe
    from model_check.blackbox.communication_profiler import CommunicationProfiler
    from model_check.config import Config, load_config, validate_config
    from model_check.engine.trainer import DDPTrainer, FSDPTrainer
    from model_check.models import SimpleModel

__version__ = "0.1.0"

# Loaded on first use: reading a configuration or a run directory must not wait for torch.
_HOMES = {
    "CommunicationProfiler": "model_check.blackbox.communication_profiler",
    "Config": "model_check.config",
    "load_config": "model_check.config",
    "validate_config": "model_check.config",
    "DDPTrainer": "model_check.engine.trainer",
    "FSDPTrainer": "model_check.engine.trainer",
    "SimpleModel": "model_check.models",
    "observe": "model_check.api",
}

__all__ = [
    "CommunicationProfiler",
    "Config",
    "DDPTrainer",
    "FSDPTrainer",
    "SimpleModel",
    "diagnose",
    "load_config",
    "observe",
    "validate_config",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'model_check' has no attribute '{name}'")


class _Package(ModuleType):
    """Keeps `model_check.diagnose` the function: the import system would set it to the package of the same name."""

    @property
    def diagnose(self) -> Any:
        return importlib.import_module("model_check.api").diagnose

    @diagnose.setter
    def diagnose(self, package: ModuleType) -> None:
        """Ignores the import system: `from model_check.diagnose import …` works without the attribute."""


sys.modules[__name__].__class__ = _Package
