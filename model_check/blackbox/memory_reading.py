"""How much memory this process holds: of the host, as the kernel counts it, and of its device, as torch counts it."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class MemoryReading:
    """Bytes. `pss` shares out pages that several ranks hold together (None: the kernel does not say); the device's
    numbers are None for a process that uses none."""

    rss: int
    pss: int | None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """RSS 1.21 GiB, PSS 0.40 GiB, device 33.42 GiB allocated, 34.10 reserved, 33.42 at its peak"""
        words = [f"RSS {self.rss / GIB:.2f} GiB"]
        if self.pss is not None:
            words.append(f"PSS {self.pss / GIB:.2f} GiB")
        if self.allocated is not None and self.reserved is not None and self.peak is not None:
            words.append(
                f"device {self.allocated / GIB:.2f} GiB allocated, {self.reserved / GIB:.2f} reserved, "
                f"{self.peak / GIB:.2f} at its peak"
            )
        return ", ".join(words)


def read_memory() -> MemoryReading:
    """Now. Asks torch only where CUDA is already in use: a look must not create a context."""
    rss, pss = _host_bytes()
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return MemoryReading(rss, pss)
    return MemoryReading(
        rss,
        pss,
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_allocated(),
    )


def _host_bytes() -> tuple[int, int | None]:
    with open("/proc/self/statm", "rb") as file:
        rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):  # a kernel without it, or one that hides it
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return rss, int(line.split()[1]) * 1024
    return rss, None


@dataclass(frozen=True)
class HostLimits:
    """Bytes; None: no such limit."""

    total: int
    available: int
    address_space: int | None
    cgroup: int | None


def read_host_limits() -> HostLimits:
    sizes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return HostLimits(
        total=sizes["MemTotal"],
        available=sizes.get("MemAvailable", sizes["MemFree"]),
        address_space=None if soft == resource.RLIM_INFINITY else soft,
        cgroup=_cgroup_limit(),
    )


def _cgroup_limit() -> int | None:
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # absent, or the word "max"
            limit = int(path.read_text())
            return limit if limit < _NO_LIMIT else None
    return None
