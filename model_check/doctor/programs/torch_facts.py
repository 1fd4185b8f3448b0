"""Imports torch, multiplies two matrices on the CPU and on every visible GPU, and says what torch was built for."""

from __future__ import annotations

import json
from typing import Any


def facts() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    built_with_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count() if cuda else 0))]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cuda_available": cuda,
        "nccl": list(torch.cuda.nccl.version()) if built_with_nccl else None,
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "built_for": torch.cuda.get_arch_list() if cuda else [],
        "capabilities": [list(torch.cuda.get_device_capability(i)) for i in range(len(devices) - 1)],
        "threads": torch.get_num_threads(),
        "wrong": [device for device in devices if not multiplies(torch, device)],
        "devices": devices,
    }


def multiplies(torch: Any, device: str) -> bool:
    """Whole numbers of this size are exact in float32, so that only a broken device gives another product."""
    left = torch.arange(64 * 64, device=device, dtype=torch.float32).reshape(64, 64) % 7
    right = torch.eye(64, device=device) * 3
    return bool(torch.equal(left @ right, left * 3))


if __name__ == "__main__":
    print(json.dumps(facts()))
