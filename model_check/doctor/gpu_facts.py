"""What the driver knows of each GPU's health, through NVML: starts no CUDA. None where a GPU does not say."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOST_LINKS = 18
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)\): (?P<xid>\d+)")
# Reasons for a lower clock that mean trouble; idling, a power cap and a user's own setting do not.
_TROUBLE = {
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}

# What two GPUs have in common on the way between them, by NVML's level.
_PATHS = (
    (0, "the same board"),
    (10, "one PCIe switch"),
    (20, "several PCIe switches"),
    (30, "the host bridge"),
    (40, "the NUMA node's memory"),
    (math.inf, "the link between CPU sockets"),
)


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as its driver describes it. Clocks in MHz, temperatures in °C, power in W."""

    index: int
    name: str
    bus_id: str = ""
    ecc_volatile: int | None = None
    ecc_lifetime: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    temperature: int | None = None
    slowdown_at: int | None = None
    clock: int | None = None
    clock_most: int | None = None
    power: float | None = None
    power_limit: float | None = None
    throttled_by: tuple[str, ...] = ()
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    pcie_generation_most: int | None = None
    numa_node: int | None = None
    links: int = 0
    memory_bytes_per_s: float | None = None
    xids: tuple[int, ...] | None = None


def read_facts(kernel_log: Path, nvml: Any | None = None) -> list[GpuFacts]:
    """Every GPU of the machine; [] where there is no driver. `nvml` stands in for pynvml."""
    with _driver(nvml) as (library, handles):
        xids = kernel_xids(kernel_log)
        return [_facts(library, handle, index, xids) for index, handle in enumerate(handles)]


def read_paths(nvml: Any | None = None) -> dict[tuple[int, int], str]:
    """How each pair of GPUs reaches one another: NVLink, or what they have in common on the way."""
    with _driver(nvml) as (library, handles):
        pairs = itertools.combinations(enumerate(handles), 2)
        return {(i, j): _path(library, one, other) for (i, one), (j, other) in pairs}


def kernel_xids(path: Path) -> dict[str, list[int]] | None:
    """Xid errors in the kernel's log, by PCI bus; None where it may not be read."""
    if not os.access(path, os.R_OK):
        return None
    found: dict[str, list[int]] = {}
    for line in _kernel_lines(path):
        match = _XID.search(line)
        if match is not None:
            found.setdefault(_bus(match["bus"]), []).append(int(match["xid"]))
    return found


def _kernel_lines(path: Path) -> Iterator[str]:
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        while True:
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:  # overwritten before it was read: go on with the next one
                continue
            except OSError:
                return  # the end of the log, or a log that may be opened and not read
            if not record:
                return
            yield from record.decode(errors="replace").splitlines()
    finally:
        os.close(log)


@contextmanager
def _driver(nvml: Any) -> Iterator[tuple[Any, list[Any]]]:
    """NVML and its handles of all GPUs; none where there is no driver."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            yield None, []
            return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield nvml, []
        return
    try:
        yield nvml, [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def _facts(library: Any, handle: Any, index: int, xids: dict[str, list[int]] | None) -> GpuFacts:
    def say(question: str, *arguments: Any) -> Any | None:
        return _ask(library, question, handle, *arguments)

    pci = say("nvmlDeviceGetPciInfo")
    bus = _text(pci.busId) if pci else ""
    rows = say("nvmlDeviceGetRemappedRows")
    uncorrected = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    reasons = say("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    power, limit = say("nvmlDeviceGetPowerUsage"), say("nvmlDeviceGetEnforcedPowerLimit")
    return GpuFacts(
        index=index,
        name=_text(library.nvmlDeviceGetName(handle)),
        bus_id=bus,
        ecc_volatile=say("nvmlDeviceGetTotalEccErrors", uncorrected, library.NVML_VOLATILE_ECC),
        ecc_lifetime=say("nvmlDeviceGetTotalEccErrors", uncorrected, library.NVML_AGGREGATE_ECC),
        rows_pending=bool(rows[2]) if rows else None,
        rows_failed=bool(rows[3]) if rows else None,
        temperature=say("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
        slowdown_at=say("nvmlDeviceGetTemperatureThreshold", library.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        clock=say("nvmlDeviceGetClockInfo", library.NVML_CLOCK_SM),
        clock_most=say("nvmlDeviceGetMaxClockInfo", library.NVML_CLOCK_SM),
        power=None if power is None else power / 1e3,
        power_limit=None if limit is None else limit / 1e3,
        throttled_by=tuple(word for bit, word in _TROUBLE.items() if reasons & bit),
        pcie_width=say("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_most=say("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_generation_most=say("nvmlDeviceGetMaxPcieLinkGeneration"),
        numa_node=_numa_node(bus),
        links=_links(library, handle),
        memory_bytes_per_s=_memory_rate(library, handle),
        xids=None if xids is None else tuple(xids.get(_bus(bus), ())),
    )


def _memory_rate(library: Any, handle: Any) -> float | None:
    """What the memory's clock and width make: two transfers a clock, bits / 8 bytes wide."""
    clock = _ask(library, "nvmlDeviceGetMaxClockInfo", handle, library.NVML_CLOCK_MEM)
    bits = _ask(library, "nvmlDeviceGetMemoryBusWidth", handle)
    return clock * 1e6 * 2 * bits / 8 if clock and bits else None


def _links(library: Any, handle: Any) -> int:
    return sum(bool(_ask(library, "nvmlDeviceGetNvLinkState", handle, link)) for link in range(_MOST_LINKS))


def _path(library: Any, one: Any, other: Any) -> str:
    if _ask(library, "nvmlDeviceGetP2PStatus", one, other, library.NVML_P2P_CAPS_INDEX_NVLINK) == 0:
        return "NVLink"
    level = _ask(library, "nvmlDeviceGetTopologyCommonAncestor", one, other)
    if level is None:
        return "an unknown path"
    return next(name for most, name in _PATHS if level <= most)


def _numa_node(bus_id: str) -> int | None:
    """NVML writes 00000000:9B:00.0, sysfs 0000:9b:00.0. A machine with one node says -1."""
    try:
        node = int(Path(f"/sys/bus/pci/devices/{bus_id[-12:].lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _bus(text: str) -> str:
    """Domain, bus and device without leading zeros and function, so that log and NVML agree."""
    return ":".join(part.lstrip("0") or "0" for part in text.lower().partition(".")[0].split(":"))


def _ask(library: Any, question: str, *arguments: Any) -> Any | None:
    """The answer, or None where this GPU or this driver has none."""
    function: Callable[..., Any] | None = getattr(library, question, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except library.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
