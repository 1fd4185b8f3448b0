"""Where the ranks of a job are: the hosts, and the devices of this one. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_check.launch.gpus import Gpu
from model_check.record import RunDir
from model_check.record.rank_context import RankContext, rank_label

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job: every one runs the same command and meets the others at `endpoint` (host:port)."""

    count: int = 1
    endpoint: str = f"{LOOPBACK}:0"
    job_id: str = "model-check"

    @property
    def local_addr(self) -> str | None:
        """Where the others find this host; None: by its name. Whoever meets on loopback is on this host already."""
        on_loopback = self.count == 1 or self.endpoint.rpartition(":")[0] in (LOOPBACK, "localhost", "[::1]")
        return LOOPBACK if on_loopback else None


@dataclass(frozen=True)
class Placement:
    """Which device each local rank gets, and what its environment says of it."""

    run_dir: RunDir
    nproc: int
    gpus: tuple[Gpu, ...]
    isolate_gpus: bool
    hosts: Hosts
    env: dict[str, str]

    def describe(self, worker: Worker, group: WorkerGroup, attempt: int) -> tuple[RankContext, dict[str, str]]:
        """The context of a rank, and the variables it gets besides those of torchrun."""
        local_rank = worker.local_rank
        assert group.group_rank is not None and group.master_port is not None, "ranks start after the rendezvous"
        # Ranks that outnumber the GPUs share them in turn, as `set_device(LOCAL_RANK % count)` does.
        slot = local_rank % len(self.gpus) if self.gpus else 0
        gpu = self.gpus[slot] if self.gpus else None
        context = RankContext(
            rank=worker.global_rank,
            local_rank=local_rank,
            world_size=worker.world_size,
            local_world_size=self.nproc,
            node_rank=group.group_rank,
            device="cpu" if gpu is None else "cuda:0" if self.isolate_gpus else f"cuda:{slot}",
            physical_gpu=gpu.index if gpu else None,
            label=rank_label(gpu, local_rank, several_hosts=self.hosts.count > 1),
            run_dir=self.run_dir.root,
            attempt=attempt,
            master_addr=str(group.master_addr),
            master_port=group.master_port,
        )
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(self._threads_per_rank())}
        if gpu is not None and self.isolate_gpus:
            # The UUID names the same device whatever order CUDA counts in.
            env["CUDA_VISIBLE_DEVICES"] = gpu.uuid
        return context, {**env, **self.env}

    def _threads_per_rank(self) -> int:
        return max(1, len(os.sched_getaffinity(0)) // self.nproc)
