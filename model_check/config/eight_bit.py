"""The package behind `training.optimizer_states=8bit`: whether it is here, and what is said where it is not."""

from __future__ import annotations

import importlib.util

from model_check.errors import UsageError


def torchao_is_installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def torchao_missing(error: ImportError | None = None) -> UsageError:
    """`error`: what an attempt to import it said."""
    state, remedy = "is not installed", "pip install torchao"
    if error is not None and torchao_is_installed():
        state, remedy = f"cannot be imported: {error}", "install the torchao that was built for this torch"
    return UsageError(
        f"training.optimizer_states=8bit needs torchao, which {state}",
        remedy=f"{remedy}, or set training.optimizer_states to bf16",
    )
