"""MFU: how much arithmetic a token costs, and how much of it a GPU can do at best.

The peaks are dense tensor-core figures by GPU name, as the vendors' data sheets give them without sparsity. A name that
is not in the table has no peak: no MFU is better than a wrong one. fp32 has none either, for whether TF32 is in use
cannot be seen from the name.
"""

from __future__ import annotations

import re

from model_check.config.shapes import ModelShape

# TFLOP/s with float32 accumulation in bf16, fp16 and fp8; None where the chip has no such unit or the figure is not
# published. A pattern must match the whole name, vendor aside, so that a variant with other clocks is never taken for
# its sibling.
_PEAKS: tuple[tuple[str, float | None, float, float | None], ...] = (
    (r"GB300.*", 2500, 2500, 5000),
    (r"GB200.*", 2500, 2500, 5000),
    (r"B300.*", 2250, 2250, 4500),
    (r"B200.*", 2250, 2250, 4500),
    (r"B100.*", 1750, 1750, 3500),
    (r"GH200.*", 989, 989, 1979),
    (r"H200 NVL", 835.5, 835.5, 1671),
    (r"H200( SXM.*)?", 989, 989, 1979),
    (r"H[18]00 NVL", 835.5, 835.5, 1671),
    (r"H[18]00 (80GB )?PCIe", 756, 756, 1513),
    (r"H[18]00 (\d+GB HBM3|SXM.*)", 989, 989, 1979),
    (r"H800", 989, 989, 1979),
    (r"H20( .*)?", 148, 148, 296),
    (r"A[18]00[- ](SXM4?|PCIE?|\d+GB).*", 312, 312, None),
    (r"A40", 149.7, 149.7, None),
    (r"A30", 165, 165, None),
    (r"A10", 125, 125, None),
    (r"A10G", 70, 70, None),
    (r"L40S", 362, 362, 733),
    (r"L40", 181, 181, 362),
    (r"L4", 121, 121, 242),
    (r"RTX 6000 Ada Generation", 364.2, 364.2, 728.5),
    (r"RTX A6000", 154.8, 154.8, None),
    (r"GeForce RTX 5090", 209.5, 209.5, 419),
    (r"GeForce RTX 4090", 165.2, 165.2, 330.3),
    (r"GeForce RTX 3090 Ti", 80, 80, None),
    (r"GeForce RTX 3090", 71, 71, None),
    (r"V100-SXM2.*", None, 125, None),
    (r"V100-SXM3.*", None, 125, None),
    (r"V100-PCIE.*", None, 112, None),
    (r"V100S-PCIE.*", None, 130, None),
    (r"T4", None, 65, None),
    (r"MI3(00|25)X.*", 1307.4, 1307.4, 2614.9),
    (r"MI250X.*", 383, 383, None),
)
_VENDOR = re.compile(r"^((NVIDIA|Tesla|AMD Instinct|AMD)\s+)+", re.IGNORECASE)
_PART_OF_A_CHIP = re.compile(r"\bMIG\b|\bvGPU\b|^GRID\b|Laptop|Max-Q", re.IGNORECASE)


def count_flops_per_token(shape: ModelShape, context: int) -> float:
    """Floating-point operations of one token's forward and backward pass at this context length.

    6 per weight (2 forward, 4 backward), the input embedding aside, for it is a lookup and no product; and
    6 · layers · width · context for causal attention, of which half the scores exist. Recomputation counts for
    nothing: MFU measures useful work.
    """
    attention_width = shape.num_heads * shape.head_dim
    return 6.0 * shape.parameters_without_embedding() + 6.0 * shape.num_layers * attention_width * context


def peak_flops(gpu_name: str, precision: str) -> float | None:
    """Dense FLOP/s of the named GPU in bf16, fp16 or fp8; None where it is not known."""
    name = gpu_name.strip()
    if _PART_OF_A_CHIP.search(name):
        return None
    name = _VENDOR.sub("", name)
    for pattern, bf16, fp16, fp8 in _PEAKS:
        if re.fullmatch(pattern, name, re.IGNORECASE):
            tera = {"bf16": bf16, "fp16": fp16, "fp8": fp8}.get(precision)
            return None if tera is None else tera * 1e12
    return None
