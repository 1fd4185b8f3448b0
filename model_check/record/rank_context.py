"""Who a rank is: its numbers, its device, its label, and how to read them from another launcher's environment."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model_check.errors import UsageError
from model_check.record.nvml import Gpu

ForeignLauncher = Literal["torchrun", "slurm"]

DEFAULT_MASTER_PORT = 29500


@dataclass(frozen=True)
class RankContext:
    """Everything a rank knows about its place in the job; plain data, so that it can be pickled."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    device: str
    physical_gpu: int | None
    label: str
    run_dir: Path
    attempt: int
    master_addr: str
    master_port: int

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str], *, run_dir: Path, gpus: Sequence[Gpu] = (), device: str = "auto"
    ) -> RankContext:
        """The rank that torchrun, torch.distributed.launch or srun made of this process.

        These launchers do not isolate GPUs: rank i of a host uses the i-th visible one, unless the
        host shows each rank a single one (srun --gpus-per-task), which is then everybody's cuda:0.
        """
        launcher = foreign_launcher(environ)
        if launcher is None:
            raise UsageError(
                "RANK and WORLD_SIZE are not in the environment", remedy="start the job with torchrun or srun"
            )
        place = _torchrun_place(environ) if launcher == "torchrun" else _slurm_place(environ)
        if not 0 <= place.rank < place.world_size:
            raise UsageError(
                f"RANK={place.rank} is not below WORLD_SIZE={place.world_size}",
                remedy="give every process of the job its own RANK from 0 to WORLD_SIZE - 1",
            )
        gpu: Gpu | None = None
        slot = 0
        if gpus and device != "cpu":
            slot = 0 if len(gpus) == 1 and place.local_world_size > 1 else place.local_rank
            if slot >= len(gpus):
                raise UsageError(
                    f"local rank {place.local_rank} needs a GPU of its own and {len(gpus)} are visible",
                    remedy=f"start at most {len(gpus)} processes per host",
                )
            gpu = gpus[slot]
        return cls(
            **vars(place),
            device=f"cuda:{slot}" if gpu else "cpu",
            physical_gpu=gpu.index if gpu else None,
            label=rank_label(gpu, place.local_rank, several_hosts=place.world_size > place.local_world_size),
            run_dir=run_dir,
            attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        )


def rank_label(gpu: Gpu | None, local_rank: int, *, several_hosts: bool) -> str:
    """`GPU3` by the number nvidia-smi shows, `CPU0` by local rank; the host in front where there are several."""
    name = f"GPU{gpu.index}" if gpu else f"CPU{local_rank}"
    return f"{socket.gethostname().split('.')[0]}:{name}" if several_hosts else name


def foreign_launcher(environ: Mapping[str, str]) -> ForeignLauncher | None:
    """Which launcher has already made a rank of this process, if any."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "torchrun"
    # A batch script has SLURM_PROCID too, but only srun's tasks have a step.
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return "slurm"
    return None


@dataclass(frozen=True)
class _Place:
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int


def _torchrun_place(environ: Mapping[str, str]) -> _Place:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank = _number(environ, "LOCAL_RANK", default=rank)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", default=world_size)
    if environ.get("MASTER_PORT") == "0" and world_size > 1:
        raise UsageError("MASTER_PORT=0 is no port to meet at", remedy="use torchrun --standalone, or name a free port")
    return _Place(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=_number(environ, "GROUP_RANK", default=rank // max(1, local_world_size)),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(environ, "MASTER_PORT", default=DEFAULT_MASTER_PORT),
    )


def _slurm_place(environ: Mapping[str, str]) -> _Place:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, world_size = _number(environ, "SLURM_PROCID"), _number(environ, tasks)
    node_rank = _number(environ, "SLURM_NODEID", default=0)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    master_addr = environ.get("MASTER_ADDR") or (first_host(nodes) if nodes else "127.0.0.1")
    # Two jobs that share a host must not meet on one port; every task of a job computes the same number.
    job_port = 20000 + _number(environ, "SLURM_JOB_ID", default=DEFAULT_MASTER_PORT) % 12000
    return _Place(
        rank=rank,
        local_rank=_number(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=_slurm_tasks_here(environ, node_rank, world_size),
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=_number(environ, "MASTER_PORT", default=job_port),
    )


def _slurm_tasks_here(environ: Mapping[str, str], node_rank: int, world_size: int) -> int:
    """Tasks on this node, from Slurm's run-length notation: `4(x2),1` is 4, 4 and 1."""
    notation = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not notation:
        return world_size
    counts: list[int] = []
    for part in notation.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UsageError(
                f"SLURM_TASKS_PER_NODE={notation} cannot be read", remedy="start the job with srun, or with torchrun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node_rank] if node_rank < len(counts) else world_size


def first_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list: `gpu[03-05,9],login1` begins with gpu03."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]*)\])?([^,\[]*)", nodelist.strip())
    if match is None:
        raise UsageError(
            f"SLURM_STEP_NODELIST={nodelist} names no host", remedy="set MASTER_ADDR to the first host of the job"
        )
    prefix, ranges, suffix = match.groups()
    if ranges is None:
        return prefix
    return prefix + re.split(r"[-,]", ranges, maxsplit=1)[0] + suffix


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise UsageError(
            f"{name} is not in the environment", remedy="start the job with torchrun or srun, which set it"
        )
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text} is not a number", remedy="start the job with torchrun or srun") from None
