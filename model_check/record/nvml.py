"""The GPUs of this machine as the driver sees them. Reads NVML only, so the process stays free of CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a GPU; `memory` is None where the driver does not say."""

    pid: int
    memory: int | None


@dataclass(frozen=True)
class Gpu:
    """One device to train on: a whole GPU, or one MIG instance of it (then `mig` is its number).

    `index` counts as nvidia-smi does; memory is in bytes (0: the driver does not say), utilization in percent.
    """

    index: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int
    utilization: int | None
    processes: tuple[GpuProcess, ...] = ()
    mig: int | None = None

    @property
    def memory_free(self) -> int:
        return self.memory_total - self.memory_used


def read_gpus(nvml: Any | None = None) -> list[Gpu]:
    """Every GPU of the machine, by index; [] where there is no driver. `nvml` stands in for pynvml."""
    library = nvml or _pynvml()
    if library is None:
        return []
    try:
        library.nvmlInit()
    except library.NVMLError:
        return []
    try:
        found: list[Gpu] = []
        for index in range(library.nvmlDeviceGetCount()):
            handle = library.nvmlDeviceGetHandleByIndex(index)
            found += _mig_instances(library, handle, index) or [_read(library, handle, index)]
        return found
    finally:
        library.nvmlShutdown()


def driver_versions(nvml: Any | None = None) -> dict[str, str | None]:
    """The driver's version and the newest CUDA it serves; None where there is no driver."""
    library = nvml or _pynvml()
    nothing: dict[str, str | None] = {"driver": None, "driver_cuda": None}
    if library is None:
        return nothing
    try:
        library.nvmlInit()
    except library.NVMLError:
        return nothing
    try:
        cuda = library.nvmlSystemGetCudaDriverVersion()
        return {
            "driver": _text(library.nvmlSystemGetDriverVersion()),
            "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
    finally:
        library.nvmlShutdown()


def _pynvml() -> ModuleType | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _mig_instances(library: Any, handle: Any, index: int) -> list[Gpu]:
    """The MIG instances of a partitioned GPU: the whole GPU cannot be used then."""
    try:
        slots = library.nvmlDeviceGetMaxMigDeviceCount(handle)
    except library.NVMLError:
        return []
    instances: list[Gpu] = []
    for slot in range(slots):
        try:
            instance = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except library.NVMLError:
            continue
        instances.append(_read(library, instance, index, mig=slot))
    return instances


def _read(library: Any, handle: Any, index: int, mig: int | None = None) -> Gpu:
    memory = _ask(library, library.nvmlDeviceGetMemoryInfo, handle)
    rates = _ask(library, library.nvmlDeviceGetUtilizationRates, handle)
    running = _ask(library, library.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return Gpu(
        index=index,
        uuid=_text(library.nvmlDeviceGetUUID(handle)),
        name=_text(library.nvmlDeviceGetName(handle)),
        memory_total=memory.total if memory else 0,
        memory_used=memory.used if memory else 0,
        utilization=rates.gpu if rates else None,
        processes=tuple(GpuProcess(pid=p.pid, memory=p.usedGpuMemory) for p in running),
        mig=mig,
    )


def _ask(library: Any, question: Any, handle: Any) -> Any | None:
    """The answer, or None where this device does not support the question (MIG, unified memory)."""
    try:
        return question(handle)
    except library.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
