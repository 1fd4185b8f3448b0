"""The arithmetic of MFU against numbers worked out by hand, and the table of peaks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from model_check.config.shapes import SHAPES, ModelShape
from model_check.plan.flops import count_flops_per_token, peak_flops

TINY = ModelShape(2, 8, 2, 1, 4, 16, 10)


def test_flops_of_a_tiny_model_counted_by_hand() -> None:
    # A layer: wq 64, wk 32, wv 32, wo 64, w1 w2 w3 128 each, two norms of 8. Then the last norm 8 and the output 80.
    weights = 2 * (64 + 32 + 32 + 64 + 3 * 128 + 16) + 8 + 80
    assert count_flops_per_token(TINY, context=5) == 6 * weights + 6 * 2 * 8 * 5


def test_a_tied_matrix_counts_once_as_the_output() -> None:
    assert count_flops_per_token(replace(TINY, tie_embeddings=True), 5) == count_flops_per_token(TINY, 5)


def test_mfu_of_a_measured_run() -> None:
    """Four layers of Llama 3.1 8B at 8192 tokens of context, 63,236 tokens/s on one H200: 58.8 %."""
    flops = count_flops_per_token(replace(SHAPES["llama-3.1-8b"], num_layers=4), 8192)
    peak = peak_flops("NVIDIA H200", "bf16")
    assert peak is not None
    assert flops * 63_236 / peak == pytest.approx(0.588, abs=0.0005)


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA H200", 989e12, 1979e12),
        ("NVIDIA H200 NVL", 835.5e12, 1671e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 1979e12),
        ("NVIDIA H100 PCIe", 756e12, 1513e12),
        ("NVIDIA H100 NVL", 835.5e12, 1671e12),
        ("NVIDIA H800", 989e12, 1979e12),
        ("NVIDIA H20", 148e12, 296e12),
        ("NVIDIA GH200 480GB", 989e12, 1979e12),
        ("NVIDIA B200", 2250e12, 4500e12),
        ("NVIDIA GB200", 2500e12, 5000e12),
        ("NVIDIA B300 SXM6 AC", 2250e12, 4500e12),
        ("NVIDIA GB300", 2500e12, 5000e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, None),
        ("NVIDIA A100 80GB PCIe", 312e12, None),
        ("A100-PCIE-40GB", 312e12, None),
        ("NVIDIA A10", 125e12, None),
        ("NVIDIA A10G", 70e12, None),
        ("NVIDIA A30", 165e12, None),
        ("NVIDIA L4", 121e12, 242e12),
        ("NVIDIA L40", 181e12, 362e12),
        ("NVIDIA L40S", 362e12, 733e12),
        ("NVIDIA GeForce RTX 3090", 71e12, None),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 330.3e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12, 419e12),
        ("NVIDIA RTX 6000 Ada Generation", 364.2e12, 728.5e12),
        ("AMD Instinct MI300X", 1307.4e12, 2614.9e12),
    ],
)
def test_peaks_of_names_as_the_driver_reports_them(name: str, bf16: float, fp8: float | None) -> None:
    assert peak_flops(name, "bf16") == pytest.approx(bf16)
    assert peak_flops(name, "fp16") == pytest.approx(bf16)
    assert peak_flops(name, "fp8") == (None if fp8 is None else pytest.approx(fp8))


def test_volta_has_a_peak_in_fp16_alone() -> None:
    assert peak_flops("Tesla V100-SXM2-16GB", "fp16") == 125e12
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA",
        "NVIDIA H100",
        "NVIDIA H300",
        "NVIDIA H2000",
        "NVIDIA L400",
        "NVIDIA A100",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "GRID A100-10C",
        "Some Chip H200",
    ],
)
def test_a_name_we_do_not_know_has_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None


@pytest.mark.parametrize("precision", ["fp32", "int8", ""])
def test_a_precision_we_do_not_know_has_no_peak(precision: str) -> None:
    assert peak_flops("NVIDIA H200", precision) is None


def test_planning_imports_no_torch() -> None:
    code = "import sys, model_check.plan.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
