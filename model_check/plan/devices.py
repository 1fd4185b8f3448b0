"""GPUs by name: how much memory they have, how fast they read it, how fast they talk to each other.

Memory is what CUDA reports as usable, a little less than the label says. Speeds are the vendors' figures. The GB of a
GPU's label are GiB: the driver shows 81,920 MiB for an A100-SXM4-80GB.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from model_check.errors import UsageError
from model_check.plan.flops import peak_flops

GIB = 2**30
# Between hosts one adapter of 400 Gbit/s for each GPU: what machines with such GPUs usually have.
NETWORK_BYTES_PER_S = 50e9
_PCIE = 32e9


@dataclass(frozen=True)
class Device:
    """One GPU. Rates are in bytes a second and in one direction; None: not known."""

    name: str
    memory_bytes: int
    memory_rate: float | None = None
    link_rate: float = _PCIE

    def peak(self, precision: str) -> float | None:
        """Dense FLOP/s of the matrix products of this precision (fp8 counts against bf16, as in the metrics)."""
        if precision == "fp8" and peak_flops(self.name, "fp8") is None:
            return None
        return peak_flops(self.name, precision.replace("fp8", "bf16"))


def _gpu(name: str, label_gb: int, gib: float, terabytes: float, link_gb: float) -> tuple[int, Device]:
    return label_gb, Device(name, round(gib * GIB), terabytes * 1e12, link_gb * 1e9)


# The short name as people say it; the name as the driver says it, the GB of the label, the GiB that CUDA reports. The
# link of a card is its PCIe slot: an NVLink bridge joins two cards, and a job may have more.
_DEVICES = {
    "H200": _gpu("H200", 141, 139.7, 4.8, 450),
    "H100": _gpu("H100 80GB HBM3", 80, 79.1, 3.35, 450),
    "H100-PCIe": _gpu("H100 PCIe", 80, 79.1, 2.0, 64),
    "H100-NVL": _gpu("H100 NVL", 94, 93.0, 3.9, 64),
    "H800": _gpu("H800", 80, 79.1, 3.35, 200),
    "H20": _gpu("H20", 96, 95.0, 4.0, 450),
    "GH200": _gpu("GH200 480GB", 96, 94.5, 4.0, 450),
    "B200": _gpu("B200", 180, 178.3, 8.0, 900),
    "B300": _gpu("B300 SXM6 AC", 288, 267.7, 8.0, 900),
    "GB200": _gpu("GB200", 186, 184.0, 8.0, 900),
    "GB300": _gpu("GB300", 288, 276.5, 8.0, 900),
    "A100": _gpu("A100-SXM4-80GB", 80, 79.2, 2.04, 300),
    "A100-80": _gpu("A100-SXM4-80GB", 80, 79.2, 2.04, 300),
    "A100-40": _gpu("A100-SXM4-40GB", 40, 39.4, 1.56, 300),
    "A100-PCIe": _gpu("A100 80GB PCIe", 80, 79.2, 1.94, 32),
    "A100-PCIe-40": _gpu("A100-PCIE-40GB", 40, 39.4, 1.56, 32),
    "A40": _gpu("A40", 48, 44.4, 0.70, 32),
    "A30": _gpu("A30", 24, 23.6, 0.93, 32),
    "A10": _gpu("A10", 24, 22.0, 0.60, 32),
    "A10G": _gpu("A10G", 24, 22.0, 0.60, 32),
    "L40": _gpu("L40", 48, 44.4, 0.86, 32),
    "L40S": _gpu("L40S", 48, 44.4, 0.86, 32),
    "L4": _gpu("L4", 24, 22.0, 0.30, 32),
    "V100": _gpu("V100-SXM2-32GB", 32, 31.7, 0.90, 150),
    "V100-16": _gpu("V100-SXM2-16GB", 16, 15.8, 0.90, 150),
    "T4": _gpu("T4", 16, 14.6, 0.30, 16),
    "RTX-A6000": _gpu("RTX A6000", 48, 47.4, 0.77, 32),
    "RTX-4090": _gpu("GeForce RTX 4090", 24, 23.5, 1.01, 32),
    "RTX-3090": _gpu("GeForce RTX 3090", 24, 23.6, 0.94, 32),
    "RTX-5090": _gpu("GeForce RTX 5090", 32, 31.4, 1.79, 64),
    "MI300X": _gpu("MI300X", 192, 191.7, 5.3, 448),
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gi?b)?", re.IGNORECASE)
_MAKER = re.compile(r"^((nvidia|tesla|geforce|amd|instinct)[\s_-]+)+", re.IGNORECASE)
# Every GPU of the table that exists as a module is that module; its cards have PCIe or NVL in their names.
_MODULE = re.compile(r"(?<![a-z0-9])(sxm\d?|hbm3e?)(?![a-z0-9])", re.IGNORECASE)
_LABEL = re.compile(r"(?<![a-z0-9.])(\d+)\s*(gi?b)?(?![a-z0-9.])", re.IGNORECASE)


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _MAKER.sub("", text.strip()).lower())


def parse_device(text: str) -> Device:
    """What `--gpu` names: a GPU (`H100`, `A100-40GB`, `4090`, `NVIDIA H200`) or its size in GiB (`141`, `80GB`)."""
    # Names first: to most people 4090 is a GPU of 24 GB and not one of 4090 GiB.
    found = _lookup(text) or _lookup(f"RTX-{_MAKER.sub('', text.strip())}")
    size = _SIZE.fullmatch(text.strip())
    if found is None and size is not None:
        gib = float(size[1])
        if math.isfinite(gib) and round(gib * GIB) > 0:
            return Device(f"{gib:g} GiB", round(gib * GIB))
    if found is None:
        raise UsageError(
            f"--gpu {text} is neither a GPU that the plan knows nor a size",
            remedy=f"give its memory in GiB, such as --gpu 80, or one of {', '.join(_DEVICES)}",
        )
    return found


def device_named(driver_name: str, memory_bytes: int | None = None) -> Device:
    """The GPU that the driver calls so; of one that is not in the table only the memory is known."""
    known = _lookup(driver_name)
    if known is None:
        return Device(driver_name, memory_bytes or 0)
    return known if memory_bytes is None else replace(known, memory_bytes=memory_bytes)


def _lookup(text: str) -> Device | None:
    wanted = _key(text)
    for short, (_, device) in _DEVICES.items():
        if wanted in (_key(short), _key(device.name)):
            return device
    name = _MODULE.sub("", text)
    if name != text:
        return _lookup(name)
    for size in _LABEL.finditer(text):
        found = _with_label(text[: size.start()] + text[size.end() :], size[1])
        if found is not None:
            return found
    return None


def _with_label(text: str, label_gb: str) -> Device | None:
    """The GPU of this name that is sold with this much memory: an A100 of 40 GB is another GPU than one of 80."""
    wanted = _key(text)
    for short, (label, device) in _DEVICES.items():
        if str(label) == label_gb and wanted in (_key(short.removesuffix(f"-{label}")), _key(device.name)):
            return device
    return None
