"""Dense tensor-core peaks by GPU name, as the vendors' data sheets give them without sparsity.

A name that is not in the table has no peak: no MFU is better than a wrong one. fp32 has none either, for whether
TF32 is in use cannot be seen from the name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """TFLOP/s with float32 accumulation; None where the chip has no such unit or the figure is not published."""

    pattern: str
    bf16: float | None
    fp16: float | None
    fp8: float | None = None


def _same(pattern: str, half: float, fp8: float | None = None) -> Peak:
    return Peak(pattern, half, half, fp8)


# A pattern must match the whole name, vendor aside, so that a variant with other clocks is never taken for its sibling.
_PEAKS = (
    _same(r"GB300.*", 2500, 5000),
    _same(r"GB200.*", 2500, 5000),
    _same(r"B300.*", 2250, 4500),
    _same(r"B200.*", 2250, 4500),
    _same(r"B100.*", 1750, 3500),
    _same(r"GH200.*", 989, 1979),
    _same(r"H200 NVL", 835.5, 1671),
    _same(r"H200( SXM.*)?", 989, 1979),
    _same(r"H[18]00 NVL", 835.5, 1671),
    _same(r"H[18]00 (80GB )?PCIe", 756, 1513),
    _same(r"H[18]00 (\d+GB HBM3|SXM.*)", 989, 1979),
    _same(r"H800", 989, 1979),
    _same(r"H20( .*)?", 148, 296),
    _same(r"A[18]00[- ](SXM4?|PCIE?|\d+GB).*", 312),
    _same(r"A40", 149.7),
    _same(r"A30", 165),
    _same(r"A10", 125),
    _same(r"A10G", 70),
    _same(r"L40S", 362, 733),
    _same(r"L40", 181, 362),
    _same(r"L4", 121, 242),
    _same(r"RTX 6000 Ada Generation", 364.2, 728.5),
    _same(r"RTX A6000", 154.8),
    _same(r"GeForce RTX 5090", 209.5, 419),
    _same(r"GeForce RTX 4090", 165.2, 330.3),
    _same(r"GeForce RTX 3090 Ti", 80),
    _same(r"GeForce RTX 3090", 71),
    Peak(r"V100-SXM2.*", None, 125),
    Peak(r"V100-SXM3.*", None, 125),
    Peak(r"V100-PCIE.*", None, 112),
    Peak(r"V100S-PCIE.*", None, 130),
    Peak(r"T4", None, 65),
    _same(r"MI3(00|25)X.*", 1307.4, 2614.9),
    _same(r"MI250X.*", 383),
)
_VENDOR = re.compile(r"^(NVIDIA|Tesla|AMD Instinct|AMD)\s+", re.IGNORECASE)
_PART_OF_A_CHIP = re.compile(r"\bMIG\b|\bvGPU\b|^GRID\b|Laptop|Max-Q", re.IGNORECASE)


def peak_flops(gpu_name: str, precision: str) -> float | None:
    """Dense FLOP/s of the named GPU in bf16, fp16 or fp8; None where it is not known."""
    name = gpu_name.strip()
    if _PART_OF_A_CHIP.search(name):
        return None
    while _VENDOR.match(name):
        name = _VENDOR.sub("", name)
    for peak in _PEAKS:
        if re.fullmatch(peak.pattern, name, re.IGNORECASE):
            tera = {"bf16": peak.bf16, "fp16": peak.fp16, "fp8": peak.fp8}.get(precision)
            return None if tera is None else tera * 1e12
    return None
