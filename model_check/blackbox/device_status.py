"""What a rank's device and process group look like right now, in a few lines."""

from __future__ import annotations

import os

import psutil
import torch
import torch.distributed as dist


def device_lines() -> list[str]:
    """CUDA where there is one, this process's memory, and whether it has joined its peers."""
    resident = psutil.Process().memory_info().rss / 2**30
    return [*_cuda(), f"resident memory {resident:.2f} GiB, {torch.get_num_threads()} threads", _group()]


def _cuda() -> list[str]:
    if not torch.cuda.is_available():
        return [f"no CUDA device (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"]
    lines = [f"{torch.cuda.device_count()} CUDA devices visible"]
    if torch.cuda.is_initialized():
        current = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(current)
        name = torch.cuda.get_device_name(current)
        lines.append(f"cuda:{current} is a {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    return lines


def _group() -> str:
    if not dist.is_initialized():
        return "no process group yet"
    return f"process group: rank {dist.get_rank()} of {dist.get_world_size()} over {dist.get_backend()}"
