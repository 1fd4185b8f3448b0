"""Every limit of the host makes its check fail when it is really too low."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from model_check.doctor import Limits, Settings
from model_check.doctor.basic import Driver, judge_cuda, judge_nccl, judge_python, judge_torch
from model_check.doctor.check import gib
from model_check.doctor.host import check_host, check_shared_memory, judge_clock, judge_load, judge_memory
from model_check.doctor.network import check_environment, check_host_name, check_loopback, check_port
from tests.doctor.conftest import confined

GIB = 2**30
TORCH = {
    "version": "2.11.0+cu130",
    "cuda": "13.0",
    "hip": None,
    "cuda_available": True,
    "nccl": [2, 28, 9],
    "gloo": True,
    "built_for": ["sm_80", "sm_90"],
    "capabilities": [[9, 0]],
    "wrong": [],
    "devices": ["cpu", "cuda:0"],
}


def test_every_limit_of_this_host_is_read() -> None:
    """Whether it is well is the host's affair; what is read must be what the system says."""
    checks = {check.name: check for check in check_host(Settings())}
    assert set(checks) == {"memory", "load", "open files", "processes", "locked memory", "shared memory", "clock"}
    assert f"{len(os.sched_getaffinity(0))} core" in checks["memory"].detail
    assert checks["clock"].status == "ok"
    assert all(check.fix for check in checks.values() if check.status != "ok")


@pytest.mark.parametrize(("size", "status"), [("1m", "fail"), ("64m", "fail"), ("512m", "warn")])
def test_small_shared_memory(tmp_path: Path, size: str, status: str) -> None:
    check = confined("shared-memory", str(tmp_path), size, unshare="-m")
    assert check.status == status
    assert size.upper().replace("M", " MiB") in check.detail
    assert "--shm-size" in check.fix


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    check = check_shared_memory(tmp_path / "nowhere", Limits())
    assert check.status == "fail" and "No such file" in check.detail


@pytest.mark.parametrize(("number", "status"), [(100, "fail"), (1024, "warn"), (4096, "ok")])
def test_low_limit_of_open_files(number: int, status: str) -> None:
    check = confined("open-files", str(number))
    assert (check.status, f"{number:,} open files" in check.detail) == (status, True)
    assert ("ulimit -n" in check.fix) == (status != "ok")


@pytest.mark.parametrize(
    ("kind", "number", "status", "fragment"),
    [
        ("address-space", 1 << 30, "fail", "1 GiB of addresses per process (ulimit -v): torch alone maps more"),
        ("address-space", 8 << 30, "warn", "8 GiB of addresses"),
        ("file-size", 100 << 10, "fail", "no file may be larger than 100 KiB (ulimit -f)"),
        ("file-size", 8 << 30, "warn", "no file may be larger than 8 GiB"),
    ],
)
def test_limits_of_the_shell_are_named_where_they_are_set(kind: str, number: int, status: str, fragment: str) -> None:
    check = confined(kind, str(number))
    assert check.name == kind.replace("-", " ")
    assert check.status == status and check.detail.startswith(fragment) and " unlimited" in check.fix


def test_low_limit_of_processes() -> None:
    check = confined("processes", "500")
    assert check.status == "warn" and "500 processes" in check.detail


def test_locked_memory_matters_where_there_is_infiniband(tmp_path: Path) -> None:
    assert confined("locked-memory", str(2**20), str(tmp_path)).status == "ok"
    (tmp_path / "mlx5_0").mkdir()
    check = confined("locked-memory", str(2**20), str(tmp_path))
    assert check.status == "warn"
    assert "1 MiB may be locked" in check.detail and "mlx5_0" in check.detail
    assert "memlock=-1" in check.fix


def test_little_memory() -> None:
    limits = Limits()
    assert judge_memory(64 * GIB, None, 8, limits).status == "ok"
    small = judge_memory(64 * GIB, GIB // 2, 8, limits)
    assert small.status == "fail" and "the container's limit; the host has 64 GiB free" in small.detail
    assert judge_memory(2 * GIB, None, 1, limits).status == "warn"


def test_a_busy_host() -> None:
    assert judge_load(3.9, 2, Limits()).status == "ok"
    busy = judge_load(19.4, 2, Limits())
    assert busy.status == "warn" and busy.detail.startswith("19.4 threads ran or waited") and "on 2:" in busy.detail


def test_a_clock_before_the_last_installation(tmp_path: Path) -> None:
    ahead = tmp_path / "environment"
    ahead.touch()
    os.utime(ahead, (time.time() + 7200, time.time() + 7200))
    settings = Settings()
    places = type(settings.places)(newest_file=ahead)
    [clock] = [check for check in check_host(Settings(places=places)) if check.name == "clock"]
    assert clock.status == "fail" and "before the last installation" in clock.detail
    assert judge_clock(1e9, 1e9 - 60, False, Limits()).detail == "2001-09-09 01:46:40 UTC, no time daemon keeps it"


@pytest.mark.parametrize("version", [(3, 9), (3, 14), (2, 7)])
def test_python_versions(version: tuple[int, int]) -> None:
    assert judge_python(version, ".".join(map(str, version))).status == "fail"
    assert judge_python((3, 12), "3.12.1").status == "ok"


def test_torch_that_is_old_or_wrong() -> None:
    assert judge_torch(TORCH, 1.0).status == "ok"
    assert "2.11 or newer" in judge_torch({**TORCH, "version": "2.4.1"}, 1.0).detail
    assert "built without gloo" in judge_torch({**TORCH, "gloo": False}, 1.0).detail
    wrong = judge_torch({**TORCH, "wrong": ["cuda:0"]}, 1.0)
    assert wrong.status == "fail" and "wrong on cuda:0" in wrong.detail


@pytest.mark.parametrize(
    ("facts", "driver", "status", "fragment"),
    [
        ({}, Driver("580.1", "13.0"), "ok", "driver 580.1 serves CUDA 13.0; torch uses 13.0 on 1 GPU"),
        ({}, Driver(None, None), "skip", "no NVIDIA driver"),
        ({}, Driver("550.1", "12.4"), "fail", "torch was built with CUDA 13.0"),
        ({"cuda": "13.1"}, Driver("580.1", "13.0"), "warn", "a little older than torch's CUDA 13.1"),
        ({"cuda": None}, Driver("580.1", "13.0"), "fail", "built for the CPU"),
        ({"cuda_available": False}, Driver("580.1", "13.0"), "fail", "is_available() is False"),
        ({"capabilities": [[12, 0]]}, Driver("580.1", "13.0"), "fail", "not sm_120"),
        ({"capabilities": [[8, 6]]}, Driver("580.1", "13.0"), "ok", "1 GPU"),
        ({"capabilities": [[12, 0]], "built_for": ["compute_90"]}, Driver("580.1", "13.0"), "ok", "1 GPU"),
    ],
)
def test_driver_and_cuda_against_torch(facts: dict[str, object], driver: Driver, status: str, fragment: str) -> None:
    check = judge_cuda({**TORCH, **facts}, driver, gpus=1)
    assert (check.status, fragment in check.detail) == (status, True), check


def test_another_nccl_than_torch_was_built_with() -> None:
    assert judge_nccl(TORCH, {"nvidia-nccl-cu13": "2.28.9"}).status == "ok"
    other = judge_nccl(TORCH, {"nvidia-nccl-cu13": "2.27.5"})
    assert other.status == "warn" and "NCCL 2.28.9, installed is 2.27.5" in other.detail
    assert judge_nccl({**TORCH, "nccl": None}, {}).status == "skip"


def test_a_taken_port_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = check_port({"MASTER_PORT": str(port)})
        assert check.status == "fail"
        assert f"MASTER_PORT={port} is taken by pid {os.getpid()}" in check.detail
        assert check_port({"MASTER_PORT": str(port), "RANK": "1"}).status == "warn", "only rank 0 listens"
    assert check_port({"MASTER_PORT": str(port)}).status == "ok"


@pytest.mark.parametrize("text", ["0", "70000", "http", "-1"])
def test_a_port_that_is_none(text: str) -> None:
    assert check_port({"MASTER_PORT": text}).status == "fail"


@pytest.mark.parametrize(
    ("environ", "fragment"),
    [
        ({"RANK": "0"}, "RANK and WORLD_SIZE go together"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one is not a number"),
        ({"MASTER_ADDR": "nowhere.invalid"}, "MASTER_ADDR=nowhere.invalid is not a host"),
    ],
)
def test_a_job_environment_that_cannot_work(environ: dict[str, str], fragment: str) -> None:
    check = check_environment(environ)
    assert (check.status, fragment in check.detail) == ("fail", True), check
    assert check.fix


def test_a_job_environment_that_works() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    assert check_environment(environ).status == "ok"
    assert check_environment({}).status == "ok"


def test_loopback_that_is_down() -> None:
    assert check_loopback(2.0).status == "ok"
    check = confined("loopback", unshare="-n")
    assert check.status == "fail" and check.detail.startswith("127.0.0.1: ")
    assert "ip link set lo up" in check.fix


def test_an_interface_that_does_not_exist() -> None:
    check = check_host_name(2.0, {"GLOO_SOCKET_IFNAME": "eth77"})
    assert check.status == "fail" and "GLOO_SOCKET_IFNAME=eth77" in check.detail and "lo" in check.fix
    assert check_host_name(2.0, {"GLOO_SOCKET_IFNAME": "lo"}).status == "ok"


def test_importing_the_doctor_brings_no_torch() -> None:
    program = "import sys, model_check.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    ("size", "text"), [(512, "0 KiB"), (64 << 20, "64 MiB"), (3 * GIB // 2, "1.5 GiB"), (250 << 40, "250 TiB")]
)
def test_sizes_a_person_would_use(size: int, text: str) -> None:
    assert gib(size) == text
