"""The warm start: import once in the launcher, fork ranks from what is already in memory.

The parent only imports. A tensor operation would start a thread pool that a forked child waits for forever, and CUDA,
once started, cannot be used by a child at all; so neither happens here, and what cannot be undone is noticed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator

from model_check.errors import LaunchError

# Besides what a rank asks for at once, what torch imports lazily in the first step: 1.5 s in every rank otherwise.
DEFAULT_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch._dynamo",
)


def preload(modules: Iterable[str]) -> None:
    """Imports everything that the ranks will need."""
    # With this, a library that asks torch.cuda.is_available() at import gets its answer without starting CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with without_looking_for_garbage():
        for name in modules:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise LaunchError(
                    f"{name} cannot be imported before the ranks start: {error}",
                    remedy="install what is missing, or use launch.start=cold to see the error in the rank",
                ) from error


@contextlib.contextmanager
def without_looking_for_garbage() -> Iterator[None]:
    """For imports: they make objects to stay, and looking for garbage among them costs 15 % of their time."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def why_not_warm() -> str | None:
    """The reason why ranks must not be forked from this process, or None."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"thread {others[0]} is running in the launcher"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is already started in the launcher"
    return None
