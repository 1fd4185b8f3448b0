"""DDP's communication hooks: what a script has put in the place of the reduction of gradients.

A hook may exchange its bucket in any way, also without adding it up: what it was handed is still this rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

_FRAMES_UP = 16
_ENGINE = torch.autograd.graph.__file__


def bucket_of_hook(frame: FrameType | None, modules: Iterable[Any]) -> Any:
    """The `GradBucket` that DDP has handed to the hook in which this call is made; None outside of one."""
    if not any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in modules):
        return None
    for _ in range(_FRAMES_UP):
        if frame is None or frame.f_code.co_filename == _ENGINE:
            break
        for value in frame.f_locals.values():
            if isinstance(value, torch.distributed.GradBucket):
                return value
        frame = frame.f_back
    return None
