"""The host's own limits: memory, open files, locked memory, /dev/shm, the clock."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from model_check.doctor.check import Check, failed, gib, graded, passed, warned
from model_check.doctor.settings import Limits, Settings
from model_check.record.cgroups import container_limit


def check_host(settings: Settings) -> Iterator[Check]:
    limits = settings.limits
    cores = len(os.sched_getaffinity(0))
    yield judge_memory(psutil.virtual_memory().available, container_limit(), cores, limits)
    yield judge_load(os.getloadavg()[0], cores, limits)
    yield check_open_files(limits)
    yield check_processes(limits)
    yield from check_shell_limits(limits)
    yield check_locked_memory(limits, settings.places.infiniband)
    yield check_shared_memory(settings.places.shared_memory, limits)
    yield judge_clock(time.time(), _newest_change(settings.places.newest_file), _kernel_says_synchronised(), limits)


def judge_memory(available: int, container: int | None, cores: int, limits: Limits) -> Check:
    usable = min(available, container) if container else available
    detail = f"{gib(usable)} of memory, {cores} core{'s' if cores != 1 else ''}"
    if container and container < available:
        detail += f" (the container's limit; the host has {gib(available)} free)"
    fix = "stop other jobs, raise the container's memory limit, or use --preset debug"
    fatal = "importing torch alone takes 0.3 GiB a rank"
    return graded("memory", usable, detail, fix, fail=limits.memory_fail, warn=limits.memory_warn, fatal=fatal)


def judge_load(load: float, cores: int, limits: Limits) -> Check:
    """A busy host makes every measurement below look worse than the machine is."""
    detail = f"{load:.1f} threads ran or waited for a core during the last minute, on {cores}"
    if load > limits.load_warn * cores:
        return warned("load", f"{detail}: what is measured here is slower than the machine", "wait, or stop other jobs")
    return passed("load", detail)


def _shell_limit(kind: int) -> float:
    """The soft limit that this process has: infinite where there is none."""
    soft, _ = resource.getrlimit(kind)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def check_open_files(limits: Limits) -> Check:
    allowed = _shell_limit(resource.RLIMIT_NOFILE)
    detail = f"{'any number' if allowed == math.inf else f'{allowed:,}'} open files per process (ulimit -n)"
    fix = f"ulimit -n {max(limits.open_files_warn, 65536)}, or docker run --ulimit nofile=65536"
    fail, warn = limits.open_files_fail, limits.open_files_warn
    return graded(
        "open files", allowed, detail, fix, fail=fail, warn=warn, fatal="sockets and loader workers need more"
    )


def check_processes(limits: Limits) -> Check:
    allowed = _shell_limit(resource.RLIMIT_NPROC)
    count = "any number of" if allowed == math.inf else f"{allowed:,}"
    fix = f"ulimit -u {max(limits.processes_warn, 65536)}: threads of all your processes count"
    detail = f"{count} processes and threads per user (ulimit -u)"
    return graded("processes", allowed, detail, fix, warn=limits.processes_warn)


def check_shell_limits(limits: Limits) -> Iterator[Check]:
    """Limits that few machines set: each is named only where it is, since what they break blames everything else."""
    space, size = _shell_limit(resource.RLIMIT_AS), _shell_limit(resource.RLIMIT_FSIZE)
    if space != math.inf:
        judge = failed if space < limits.address_space_fail else warned
        why = "torch alone maps more" if judge is failed else "CUDA maps far more than it uses"
        detail = f"{gib(space)} of addresses per process (ulimit -v): {why}"
        yield judge("address space", detail, "ulimit -v unlimited; launch.memory_limit_gb limits the ranks alone")
    if size != math.inf:
        judge = failed if size < limits.file_size_fail else warned
        detail = f"no file may be larger than {gib(size)} (ulimit -f)"
        yield judge("file size", detail, "ulimit -f unlimited: checkpoints and caches are large")


def check_locked_memory(limits: Limits, infiniband: Path) -> Check:
    """InfiniBand pins its buffers; NCCL fails with 'unhandled system error' where it may not."""
    allowed = _shell_limit(resource.RLIMIT_MEMLOCK)
    detail = f"{'any amount' if allowed == math.inf else gib(allowed)} may be locked (ulimit -l)"
    adapters = ", ".join(sorted(path.name for path in infiniband.iterdir())) if infiniband.is_dir() else ""
    if not adapters:
        return passed("locked memory", f"{detail}; no InfiniBand adapter needs it")
    if allowed < limits.locked_memory_warn:
        fix = "ulimit -l unlimited, docker run --ulimit memlock=-1, or NCCL_IB_DISABLE=1 to do without InfiniBand"
        return warned("locked memory", f"{detail}, and {adapters} must lock its buffers", fix)
    return passed("locked memory", f"{detail}, for {adapters}")


def check_shared_memory(folder: Path, limits: Limits) -> Check:
    """NCCL's buffers between the ranks of a host and the batches of loader workers lie there."""
    name = "shared memory"
    fix = "docker run --shm-size=8g (or --ipc=host); elsewhere mount -o remount,size=8G /dev/shm"
    try:
        space = psutil.disk_usage(str(folder))
    except OSError as error:
        return failed(name, f"{folder}: {error.strerror}", fix)
    if not os.access(folder, os.W_OK):
        return failed(name, f"{folder} cannot be written to", "mount it with mode 1777")
    detail = f"{gib(space.free)} free of {gib(space.total)} in {folder}"
    fail, warn = limits.shared_memory_fail, limits.shared_memory_warn
    fatal = "ranks and loader workers die with a bus error"
    return graded(name, space.free, detail, fix, fail=fail, warn=warn, fatal=fatal)


def _newest_change(path: Path) -> float:
    """When the environment was last installed into: a moment that lies in the past."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _kernel_says_synchronised() -> bool | None:
    """What the kernel knows of a time daemon; None where it may not be asked."""
    buffer = (ctypes.c_long * 64)()  # struct timex with modes 0: only reads
    state: int = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(buffer))
    return None if state < 0 else state != 5


def judge_clock(now: float, newest: float, synchronised: bool | None, limits: Limits) -> Check:
    """Certificates, checkpoints 'by newest' and logs of several hosts need a clock that is roughly right."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    fix = "set it: timedatectl set-ntp true, or ntpdate; a container takes its host's clock"
    if newest - now > limits.clock_skew_fail_s:
        behind = newest - now
        return failed("clock", f"{shown} lies {behind:,.0f} s before the last installation of packages here", fix)
    state = {True: "kept by a time daemon", False: "no time daemon keeps it", None: "whether it is kept is not known"}
    return passed("clock", f"{shown}, {state[synchronised]}")
