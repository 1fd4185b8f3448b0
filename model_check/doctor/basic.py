"""Stage basic: Python, torch, and whether torch, driver, CUDA and NCCL belong together. Then the host's own limits."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from model_check.doctor import host
from model_check.doctor.check import Check, failed, passed, skipped, warned
from model_check.doctor.probe import ask
from model_check.doctor.remedies import host_remedy
from model_check.doctor.settings import Settings
from model_check.record.environment import package_versions
from model_check.record.nvml import driver_versions

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
OLDEST_TORCH = (2, 11)


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver and the newest CUDA it serves; None where there is none."""

    version: str | None
    cuda: str | None

    @classmethod
    def read(cls) -> Driver:
        found = driver_versions()
        return cls(found["driver"], found["driver_cuda"])


def check_basic(settings: Settings) -> Iterator[Check]:
    yield judge_python(sys.version_info[:2], platform.python_version())
    answer = ask("torch_facts", limit_s=settings.limits.torch_limit_s, environ=settings.environ)
    if answer.problem:
        fix = host_remedy(answer.problem, "reinstall torch: bash run.sh does it")
        yield failed("torch", f"import and first product: {answer.problem}", fix)
    else:
        facts, driver = answer.value, Driver.read()
        yield judge_torch(facts, answer.seconds)
        yield judge_cuda(facts, driver, gpus=len(settings.gpus))
        yield judge_nccl(facts, package_versions(["nvidia-nccl-cu13", "nvidia-nccl-cu12"]))
    yield from host.check_host(settings)


def judge_python(version: Sequence[int], full: str) -> Check:
    if OLDEST_PYTHON <= tuple(version) <= NEWEST_PYTHON:
        return passed("python", full)
    return failed("python", f"{full}, and 3.10 to 3.13 are supported", "PYTHON=/path/to/python3.12 bash run.sh")


def judge_torch(facts: dict[str, Any], seconds: float) -> Check:
    """Old enough to lack what we use, or a product that is wrong: neither can train."""
    version = str(facts["version"])
    if facts["wrong"]:
        return failed(
            "torch",
            f"{version}: a product of two small matrices is wrong on {', '.join(facts['wrong'])}",
            "do not train on it: run the memory test of the host, or leave the GPU out with --gpus",
        )
    if _numbers(version) < OLDEST_TORCH:
        return failed("torch", f"{version}, and 2.11 or newer is needed", "pip install -r requirements.txt")
    if not facts["gloo"]:
        return failed("torch", f"{version} was built without gloo", "install torch from its official wheels")
    built = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "the CPU"
    return passed("torch", f"{version} for {built}; imported and multiplied in {seconds:.1f} s")


def judge_cuda(facts: dict[str, Any], driver: Driver, gpus: int) -> Check:
    """The driver must serve the CUDA that torch was built with, and torch must hold code for each chip."""
    name, built = "cuda and driver", facts["cuda"]
    if driver.version is None:
        return skipped(name, "no NVIDIA driver here: ranks run on the CPU")
    found = f"driver {driver.version} serves CUDA {driver.cuda}"
    if built is None:
        fix = "install the CUDA build of torch; its Get Started page has the command"
        return failed(name, f"{found}, but this torch was built for the CPU", fix)
    if driver.cuda and _numbers(driver.cuda)[0] < _numbers(built)[0]:
        return failed(
            name, f"{found}; torch was built with CUDA {built}", f"update the driver, or torch for {driver.cuda}"
        )
    if gpus and not facts["cuda_available"]:
        fix = "nvidia-smi; check CUDA_VISIBLE_DEVICES and the container's --gpus all"
        return failed(name, f"{found} and {_count(gpus)}, but torch.cuda.is_available() is False", fix)
    foreign = [f"sm_{a}{b}" for a, b in facts["capabilities"] if not _has_code_for(facts["built_for"], a, b)]
    if foreign:
        known = ", ".join(facts["built_for"])
        return failed(
            name, f"torch {facts['version']} holds code for {known}, not {foreign[0]}", "install a newer torch"
        )
    if driver.cuda and _numbers(driver.cuda) < _numbers(built):
        fix = "update the driver where something fails with 'PTX was compiled with an unsupported toolchain'"
        return warned(name, f"{found}, a little older than torch's CUDA {built}", fix)
    return passed(name, f"{found}; torch uses {built} on {_count(len(facts['devices']) - 1)}")


def judge_nccl(facts: dict[str, Any], installed: dict[str, str | None]) -> Check:
    """Another NCCL than the one torch was built with is loaded silently, and fails in collectives."""
    if not facts["nccl"]:
        return skipped("nccl", "torch has no NCCL: ranks on the CPU use gloo")
    built = ".".join(map(str, facts["nccl"]))
    others = [
        version for version in installed.values() if version and _numbers(version)[:2] != tuple(facts["nccl"][:2])
    ]
    if others:
        fix = f"pip install --force-reinstall the nvidia-nccl package of version {built}"
        return warned("nccl", f"torch was built with NCCL {built}, installed is {others[0]}", fix)
    return passed("nccl", f"{built}, the one torch was built with")


def _has_code_for(built_for: Sequence[str], major: int, minor: int) -> bool:
    """Binary code runs on later chips of the same generation; PTX (compute_) on every later one."""
    for entry in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", entry)
        if match is None:
            continue
        kind, code = match[1], (int(match[2]), int(match[3]))
        if kind == "sm" and code[0] == major and code[1] <= minor:
            return True
        if kind == "compute" and code <= (major, minor):
            return True
    return False


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _count(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"
