"""Stage comm: how fast all-reduce, all-gather and reduce-scatter are between the ranks, by size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model_check.doctor.check import Check, failed, gib, passed, warned
from model_check.doctor.gpu_facts import read_facts
from model_check.doctor.jobs import finished_job
from model_check.doctor.network import check_loopback
from model_check.doctor.probe import PROGRAMS
from model_check.doctor.settings import MIB, Settings

CPU_SIZES = (64 * 1024, MIB, 16 * MIB)
GPU_SIZES = (64 * 1024, MIB, 16 * MIB, 256 * MIB)


@dataclass(frozen=True)
class Rate:
    """One collective at one size; the bus bandwidth is what crosses the slowest link."""

    collective: str
    size: int
    seconds: float
    algorithm_gb_s: float
    bus_gb_s: float


@dataclass(frozen=True)
class Measured:
    """All of it, or why there is nothing."""

    ranks: int
    kind: str
    rates: tuple[Rate, ...]
    problem: str = ""


def check_comm(settings: Settings) -> Iterator[Check]:
    if check_loopback(settings.limits.answer_s).status == "fail":
        yield failed("bandwidth", "ranks cannot meet without loopback", "model-check doctor --only ranks finds out why")
        return
    measured = measure(settings)
    name = f"{measured.ranks} {'GPUs' if measured.kind == 'cuda' else 'CPU ranks'}"
    if measured.problem:
        yield failed(f"bandwidth, {name}", measured.problem, "model-check doctor --only ranks finds out why")
        return
    least, link = _least(settings, measured.kind)
    for collective in dict.fromkeys(rate.collective for rate in measured.rates):
        yield judge_rates(collective, [r for r in measured.rates if r.collective == collective], name, least, link)


def measure(settings: Settings, sizes: Sequence[int] | None = None, ranks: int | None = None) -> Measured:
    """Between all GPUs where there are two or more, else between CPU ranks."""
    kind = "cuda" if len(settings.gpus) > 1 else "cpu"
    count = ranks or (len(settings.gpus) if kind == "cuda" else settings.cpu_ranks)
    chosen = ",".join(map(str, sizes or (GPU_SIZES if kind == "cuda" else CPU_SIZES)))
    arguments = ["--nproc", str(count), str(PROGRAMS / "rank_bandwidth.py"), "rates.json", kind, chosen]
    with finished_job(settings.run, arguments, settings) as job:
        if job.problem:
            return Measured(count, kind, (), job.problem)
        rows = json.loads((job.folder / "rates.json").read_text())
    return Measured(count, kind, tuple(Rate(**row) for row in rows))


def _least(settings: Settings, kind: str) -> tuple[float, str]:
    """What the slowest acceptable link carries: NVLink where every GPU has it, else PCIe; between CPU ranks memory."""
    limits = settings.limits
    if kind == "cpu":
        return limits.cpu_bus_warn_gb_s, "memory"
    every = read_facts(settings.places.kernel_log)
    if every and all(gpu.links for gpu in every):
        return limits.nvlink_bus_warn_gb_s, "NVLink"
    return limits.pcie_bus_warn_gb_s, "PCIe"


def judge_rates(collective: str, rates: Sequence[Rate], ranks: str, least: float, link: str) -> Check:
    """The largest size decides; the small ones show the latency."""
    largest = max(rates, key=lambda rate: rate.size)
    by_size = ", ".join(f"{gib(rate.size)} {rate.bus_gb_s:.2f}" for rate in rates)
    detail = f"{ranks}, GB/s on the bus: {by_size} ({min(rate.seconds for rate in rates) * 1e6:,.0f} µs at least)"
    if largest.bus_gb_s < least:
        fix = {
            "memory": "stop other jobs on these cores; OMP_NUM_THREADS=1 for the measurement",
            "PCIe": "check the PCIe width under gpu, NCCL_DEBUG=INFO for the path taken, and NUMA binding",
            "NVLink": "nvidia-smi nvlink -s and nvidia-smi topo -m; NCCL_DEBUG=INFO must show P2P over NVLink",
        }[link]
        return warned(collective, f"{detail}; {link} should carry {least:g} or more", fix)
    return passed(collective, detail)
