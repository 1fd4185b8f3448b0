"""What the doctor is told: where to look, where a check turns yellow or red, and how to start a job.

Everything a check compares with stands here, so that a test points one field at a tiny file system, a taken port or a
server of its own and sees the real check fail.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from model_check.record.cgroups import usable_cores
from model_check.record.nvml import Gpu

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Places:
    """Folders, devices and addresses that training will use."""

    checkpoints: Path = Path(".checkpoints")
    cache: Path = Path(".cache/datasets")
    outputs: Path = Path(".outputs")
    logs: Path = Path("/tmp")
    shared_memory: Path = Path("/dev/shm")
    infiniband: Path = Path("/sys/class/infiniband")
    kernel_log: Path = Path("/dev/kmsg")
    newest_file: Path = Path(sys.prefix)
    hub: str = "https://huggingface.co"


@dataclass(frozen=True)
class Limits:
    """Below `_fail` training does not work, below `_warn` it may not, or not well. Rates are shares of what is due."""

    shared_memory_fail: int = 128 * MIB
    shared_memory_warn: int = GIB
    memory_fail: int = GIB
    memory_warn: int = 4 * GIB
    load_warn: float = 2.0  # runnable threads a core
    disk_fail: int = GIB
    disk_warn: int = 20 * GIB
    write_warn_mb_s: float = 50.0
    open_files_fail: int = 256
    open_files_warn: int = 4096
    address_space_fail: int = 1200 * MIB  # torch, gloo and the usual packages
    file_size_fail: int = GIB
    locked_memory_warn: int = 64 * MIB
    processes_warn: int = 1024
    clock_skew_warn_s: float = 30.0
    clock_skew_fail_s: float = 300.0
    import_warn_s: float = 30.0
    import_limit_s: float = 120.0
    answer_s: float = 2.0
    torch_limit_s: float = 120.0
    job_limit_s: float = 120.0
    lock_limit_s: float = 10.0
    sibling_warn: float = 0.90
    sibling_fail: float = 0.75
    matmul_warn: float = 0.55
    matmul_fail: float = 0.30
    bandwidth_warn: float = 0.65
    bandwidth_fail: float = 0.40
    cpu_bus_warn_gb_s: float = 0.01
    pcie_bus_warn_gb_s: float = 4.0
    nvlink_bus_warn_gb_s: float = 100.0
    hot_below_slowdown_c: int = 5
    verify_cache_bytes: int = 256 * MIB


@dataclass(frozen=True)
class Settings:
    """All of it. `train` and `run` are the commands that start a job; `peak` gives the FLOP/s of a GPU in bf16."""

    places: Places = field(default_factory=Places)
    limits: Limits = field(default_factory=Limits)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    gpus: tuple[Gpu, ...] = ()
    cpu_ranks: int = 2
    cores: int = field(default_factory=usable_cores)
    train: tuple[str, ...] = (sys.executable, "-m", "model_check.cli.main", "train")
    run: tuple[str, ...] = (sys.executable, "-m", "model_check.cli.main", "run")
    # Where nobody says what a GPU should give, only its siblings can be compared with.
    peak: Callable[[str], float | None] = lambda gpu_name: None
