"""What a run was made of: versions, machine, GPUs, variables. Secrets are replaced on the way."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from model_check.record.cgroups import usable_cores
from model_check.record.nvml import driver_versions, read_gpus
from model_check.record.redaction import redact_argv, redact_variables
from model_check.record.typed import to_json

_PACKAGES = (
    *("model-check", "torch", "numpy", "pydantic", "tokenizers", "transformers", "datasets", "huggingface_hub"),
    *("pyarrow", "safetensors", "tensorboard", "wandb", "nvidia-ml-py", "psutil", "py-spy", "flash-attn", "triton"),
)


@dataclass(frozen=True)
class Environment:
    """What may explain a difference between two runs."""

    time: float = 0.0  # wall-clock seconds
    host: str = ""
    platform: str = ""
    python: str = ""
    executable: str = ""
    cwd: str = ""
    git_commit: str | None = ""  # None: the folder is no repository
    argv: tuple[str, ...] = ()
    cpu_count: int | None = None  # of the host
    cpus_allowed: int = 0  # to this process
    cores: int | None = None  # granted to the container; earlier versions did not record it
    memory_bytes: int = 0
    memory_available_bytes: int | None = None  # when the job began
    gpus: tuple[dict[str, Any], ...] = ()
    driver: str | None = ""  # None, here and below: there is none
    driver_cuda: str | None = ""
    torch: str = ""
    cuda: str | None = ""
    nccl: str | None = ""
    cudnn: str | None = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def snapshot_environment() -> dict[str, Any]:
    """Everything that may explain a difference between two runs, ready for environment.json. Starts no CUDA."""
    memory = psutil.virtual_memory()
    drivers: dict[str, Any] = driver_versions()
    return to_json(
        Environment(
            time=time.time(),
            host=socket.gethostname(),
            platform=platform.platform(),
            python=platform.python_version(),
            executable=sys.executable,
            cwd=str(Path.cwd()),
            git_commit=git_commit(Path.cwd()),
            argv=tuple(redact_argv(sys.argv, os.environ)),
            cpu_count=os.cpu_count(),
            cpus_allowed=len(os.sched_getaffinity(0)),
            cores=usable_cores(),
            memory_bytes=memory.total,
            memory_available_bytes=memory.available,
            gpus=tuple(asdict(gpu) for gpu in read_gpus()),
            **drivers,
            **_torch_versions(),
            packages=package_versions(_PACKAGES),
            variables=redact_variables(os.environ),
        )
    )


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """The installed version of each distribution; None where it is not installed."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def git_commit(folder: Path) -> str | None:
    """The commit of the folder's repository, with `+changes` where the work tree differs; None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return f"{commit}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit


def _git(folder: Path, *words: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _torch_versions() -> dict[str, Any]:
    import torch

    built_with_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if built_with_nccl else None,
        "cudnn": _cudnn_version(torch),
    }


def _cudnn_version(torch: Any) -> str | None:
    if torch.version.cuda is None:
        return None
    versions = package_versions(["nvidia-cudnn-cu13", "nvidia-cudnn-cu12"])
    return next((version for version in versions.values() if version), None)
