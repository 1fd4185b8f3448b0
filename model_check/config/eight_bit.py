"""The package behind `training.optimizer_states=8bit`: whether it is here, and what is said where it is not."""

from __future__ import annotations

import importlib.util

from model_check.errors import UsageError


def torchao_is_installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def torchao_missing() -> UsageError:
    return UsageError(
        "training.optimizer_states=8bit needs torchao, which is not installed",
        remedy="pip install torchao, or set training.optimizer_states to bf16",
    )
