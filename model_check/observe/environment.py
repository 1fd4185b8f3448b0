"""What a run was made of: versions, machine, GPUs, variables. Secrets are replaced before anything leaves this file."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from model_check.observe.nvml import driver_versions, read_gpus

REDACTED = "[redacted]"

_PACKAGES = (
    *("model-check", "torch", "numpy", "pydantic", "tokenizers", "transformers", "datasets", "huggingface_hub"),
    *("pyarrow", "safetensors", "tensorboard", "wandb", "nvidia-ml-py", "psutil", "py-spy", "flash-attn", "triton"),
)
# "tokenizer" and "author" are no secrets, and what a run's tokenizer was matters.
_SECRET_NAME = re.compile(r"key|token(?!iz)|secret|passw|passphrase|credential|cookie|auth(?!or)", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_KNOWN_SHAPE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
_SHORTEST_SECRET = 6  # shorter values ("1", "true") would be blanked out of every other text they occur in


def snapshot_environment() -> dict[str, Any]:
    """Everything that may explain a difference between two runs, ready for environment.json. Starts no CUDA."""
    memory = psutil.virtual_memory()
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cwd": str(Path.cwd()),
        "git_commit": git_commit(Path.cwd()),
        "argv": redact_argv(sys.argv, os.environ),
        "cpu_count": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "gpus": [asdict(gpu) for gpu in read_gpus()],
        **driver_versions(),
        **_torch_versions(),
        "packages": package_versions(_PACKAGES),
        "variables": redact_variables(os.environ),
    }


def looks_secret(name: str) -> bool:
    """Whether a variable or flag of this name holds something that nobody else may read."""
    return _SECRET_NAME.search(name) is not None


def redact_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with every secret replaced: by name, by shape, and wherever a secret's value is repeated."""
    secrets = _secret_values(environ)
    return {
        name: REDACTED if looks_secret(name) and value else redact_text(value, secrets)
        for name, value in sorted(environ.items())
    }


def redact_argv(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command line with secrets replaced: `--token=x`, `--token x`, `a.key=x`, and values of secret variables."""
    secrets = _secret_values(environ)
    shown: list[str] = []
    value_is_secret = False
    for word in argv:
        secret_name = next((name for name in _names_in(word) if looks_secret(name)), None)
        if value_is_secret and not word.startswith("--"):
            shown.append(REDACTED)
        elif secret_name is not None:
            shown.append(f"{redact_text(secret_name, secrets)}={REDACTED}")
        else:
            shown.append(redact_text(word, secrets))
        value_is_secret = word.startswith("-") and "=" not in word and looks_secret(word)
    return shown


def _names_in(word: str) -> list[str]:
    """What may name a value in `--set=hub.token=abc`: `--set` and `--set=hub.token`."""
    return [word[:place] for place, character in enumerate(word) if character == "="]


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """The text without the given secrets, user names and passwords in URLs, and tokens of well-known shape."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return _KNOWN_SHAPE.sub(REDACTED, _URL_USER.sub(f"{REDACTED}@", text))


def _secret_values(environ: Mapping[str, str]) -> list[str]:
    # The longest first: one secret may contain another.
    values = {value for name, value in environ.items() if looks_secret(name) and len(value) >= _SHORTEST_SECRET}
    return sorted(values, key=len, reverse=True)


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
