"""Where a rank stands in the job."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from model_check.config import Config
from model_check.errors import UsageError


@dataclass(frozen=True)
class Place:
    """One rank: its number among the others and the device it owns."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    label: str = "CPU0"
    ranks_per_host: int | None = None  # None: the whole job is on this host

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def own_device(device: torch.device, rank: int) -> torch.device:
    """`cuda` without a number is this rank's GPU: the one torchrun counts for it, or the one of its rank."""
    if device.type != "cuda" or device.index is not None:
        return device
    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError("device='cuda', and torch sees no GPU here", remedy="pass device='cpu'")
    local = os.environ.get("LOCAL_RANK", "")
    return torch.device("cuda", (int(local) if local.isdecimal() else rank) % count)


def join(place: Place, config: Config) -> None:
    """Joins the job's default process group (address and port from the environment). A lone rank needs none."""
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    if place.world_size == 1 or dist.is_initialized():
        return
    wanted = config.system.backend
    backend = wanted or ("nccl" if place.device.type == "cuda" else "gloo")
    # Offloaded parameters live in host memory, so that collectives must work there too.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" and config.fsdp.cpu_offload else backend,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=config.system.timeout_s),
        device_id=place.device if place.device.type == "cuda" and wanted != "gloo" else None,
    )


def join_alone(place: Place) -> None:
    """A process group of one, for what is built on groups whatever their size (fsdp with cpu_offload on one GPU)."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if place.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def leave() -> None:
    """Leaves the process group after a run that went well. An error path must not call this: it communicates."""
    if dist.is_initialized():
        dist.destroy_process_group()
