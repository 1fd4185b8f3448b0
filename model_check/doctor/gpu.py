"""Stage gpu: is each GPU well, who else is on it, how is it connected, and how fast is it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import psutil

from model_check.doctor.check import Check, failed, gib, passed, skipped, warned
from model_check.doctor.gpu_facts import GpuFacts, read_facts, read_paths
from model_check.doctor.gpu_speed import check_speed
from model_check.doctor.settings import Limits, Settings
from model_check.launch import Gpu

# Xids that a program causes by itself: an illegal address, a preemptive clean-up after a crash.
_CAUSED_BY_PROGRAMS = frozenset({13, 31, 43, 45})


def check_gpus(settings: Settings) -> Iterator[Check]:
    if not settings.gpus:
        yield skipped("gpus", "no NVIDIA GPU is visible: ranks run on the CPU")
        return
    seen = {gpu.index for gpu in settings.gpus}
    every = [facts for facts in read_facts(settings.places.kernel_log) if facts.index in seen]
    for facts in every:
        yield judge_errors(facts)
        yield judge_clocks(facts, settings.limits)
    for gpu in settings.gpus:
        yield judge_company(gpu)
    yield judge_connections(every, read_paths())
    yield from check_speed(settings, {facts.index: facts for facts in every})


def judge_errors(facts: GpuFacts) -> Check:
    """Memory errors that could not be corrected, rows that could not be replaced, Xids of the hardware."""
    name = f"GPU {facts.index} errors"
    drain = "drain this GPU and reset it: nvidia-smi --gpu-reset, or reboot; replace it where it comes back"
    if facts.rows_failed:
        return failed(name, "a row of memory is broken and no spare row is left", "replace the GPU")
    if facts.ecc_volatile:
        return failed(name, f"{facts.ecc_volatile} uncorrected memory errors since the driver started", drain)
    if facts.rows_pending:
        return warned(name, "a broken row of memory is replaced at the next reset", "nvidia-smi --gpu-reset")
    serious = [xid for xid in facts.xids or () if xid not in _CAUSED_BY_PROGRAMS]
    if serious:
        seen = ", ".join(f"Xid {xid} ×{count}" for xid, count in Counter(serious).most_common())
        return warned(name, f"the kernel log holds {seen}", drain)
    lifetime = "" if facts.ecc_lifetime is None else f", {facts.ecc_lifetime} in its lifetime"
    ecc = "no ECC counter" if facts.ecc_volatile is None else f"no uncorrected memory error{lifetime}"
    log = "the kernel log may not be read" if facts.xids is None else "no Xid in the kernel log"
    return passed(name, f"{ecc}, {log}")


def judge_clocks(facts: GpuFacts, limits: Limits) -> Check:
    name = f"GPU {facts.index} clocks"
    parts = []
    if facts.clock is not None and facts.clock_most is not None:
        parts.append(f"{facts.clock} of {facts.clock_most} MHz")
    if facts.temperature is not None:
        parts.append(f"{facts.temperature} °C")
    if facts.power is not None and facts.power_limit is not None:
        parts.append(f"{facts.power:.0f} of {facts.power_limit:.0f} W")
    detail = ", ".join(parts) or "the driver does not say"
    if facts.throttled_by:
        fix = "check cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
        return warned(name, f"{detail}: slowed down by {', '.join(facts.throttled_by)}", fix)
    hot_at = None if facts.slowdown_at is None else facts.slowdown_at - limits.hot_below_slowdown_c
    if facts.temperature is not None and hot_at is not None and facts.temperature >= hot_at:
        return warned(name, f"{detail}, and it slows down at {facts.slowdown_at} °C", "check cooling and air flow")
    return passed(name, detail)


def judge_company(gpu: Gpu) -> Check:
    """Who else is on the GPU. A driver inside a container may know of processes that it cannot name."""
    name = f"GPU {gpu.index} is free"
    if not gpu.processes:
        return passed(name, f"{gib(gpu.memory_free)} of {gib(gpu.memory_total)} free, no other process")
    who = ", ".join(_process(process.pid, process.memory) for process in gpu.processes)
    fix = "stop it, or train elsewhere: model-check train --gpus auto takes the least used"
    return warned(name, f"in use by {who}", fix)


def _process(pid: int, memory: int | None) -> str:
    try:
        title = psutil.Process(pid).name()
    except psutil.Error:
        title = "not visible from here"
    return f"pid {pid} ({title}" + (f", {gib(memory)})" if memory else ")")


def judge_connections(every: Sequence[GpuFacts], paths: dict[tuple[int, int], str]) -> Check:
    """PCIe at its full width, and the same kind of path between all pairs: one slow pair slows the whole ring."""
    name = "GPU connections"
    narrow = [f for f in every if f.pcie_width and f.pcie_width_most and f.pcie_width < f.pcie_width_most]
    if narrow:
        first = narrow[0]
        detail = f"GPU {first.index} has {first.pcie_width} of its {first.pcie_width_most} PCIe lanes"
        return warned(name, detail, "reseat the card or its riser, or move it to a slot of full width")
    seen = {facts.index for facts in every}
    kinds = Counter(kind for pair, kind in paths.items() if seen.issuperset(pair))
    parts = [
        f"PCIe {first.pcie_generation_most} ×{first.pcie_width}"
        for first in every[:1]
        if first.pcie_generation_most and first.pcie_width
    ]
    parts += [f"{count} pair{'s' if count != 1 else ''} over {kind}" for kind, count in kinds.most_common()]
    links = sorted({facts.links for facts in every})
    if links != [0]:
        parts.append(f"{'–'.join(map(str, links))} NVLinks each")
    nodes = {facts.numa_node for facts in every if facts.numa_node is not None}
    if nodes:
        parts.append(f"NUMA node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, sorted(nodes)))}")
    detail = ", ".join(parts) or "the driver does not say"
    if len(links) > 1:
        return warned(name, f"{detail}: not every GPU has all its links", "nvidia-smi nvlink -s; reset the GPUs")
    if len(kinds) > 1 and "NVLink" in kinds:
        return warned(name, f"{detail}: one slow pair slows the whole ring", "choose GPUs of one island with --gpus")
    return passed(name, detail)
