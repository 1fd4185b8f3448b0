"""The banner, letter by letter as the guides show it, and the causes behind it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.numerics.banner import BadTensor, banner_lines, device_name

PAGE = Path(__file__).resolve().parents[2] / "docs" / "numerics.md"
NAN = math.nan


def test_the_banner_is_that_of_the_page() -> None:
    shown = re.search(r"```text\n(=+\nNaN GRADIENT.*?)\n```", PAGE.read_text(encoding="utf-8"), re.S)
    assert shown is not None
    lines = banner_lines(
        "GPU6",
        0,
        12.6087,
        NAN,
        [
            BadTensor("tok_embed.weight", (128256, 4096), (NAN,) * 5, 525336576, 525336576),
            BadTensor("layers.0.attention.wq.weight", (4096, 4096), (NAN,) * 5, 16777216, 16777216),
        ],
        checkpoint=".checkpoints/nan_grad_step_0.pt",
        tensors=".checkpoints/debug/nan_debug_step_0.pkl",
    )
    assert "\n".join(lines) == shown[1]


def test_values_that_are_not_nan_are_shown_as_they_are() -> None:
    tensor = BadTensor("w", (3,), (1.5, math.inf, -math.inf), 2, 3)
    assert tensor.values_text == "['1.5', 'Inf', '-Inf']"
    text = "\n".join(banner_lines("CPU1", 7, NAN, math.inf, [tensor], [tensor]))
    assert "NaN GRADIENT DETECTED [CPU 1]" in text
    assert "Loss: nan\nGradient Norm: inf\n" in text
    assert "⚠️  Parameters with NaN (1 layers):\n  • w (shape: torch.Size([3]))\n    Values: [" in text
    assert "saved" not in text, "nothing was saved"


def test_many_tensors_are_counted_and_not_all_listed() -> None:
    tensors = [BadTensor(f"layers.{n}.w", (2,), (NAN, NAN), 2, 2) for n in range(30)]
    lines = banner_lines("GPU0", 1, 2.0, NAN, tensors)
    assert "⚠️  Gradients with NaN (30 layers):" in lines
    assert sum(line.startswith("  • ") for line in lines) == 10
    assert "Total layers with NaN gradients: 30" in lines
    assert any(line.startswith("Affected layers: ['layers.0.w', ") and line.endswith(", ...]") for line in lines)


@pytest.mark.parametrize(
    ("label", "shown"), [("GPU6", "GPU 6"), ("CPU0", "CPU 0"), ("node-7:GPU12", "GPU 12"), ("odd", "odd")]
)
def test_the_device_is_named_as_the_guides_name_it(label: str, shown: str) -> None:
    assert device_name(label) == shown


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=8),
    st.integers(0, 10**9),
    st.floats(),
    st.floats(),
)
def test_any_numbers_make_whole_lines(values: list[float], step: int, loss: float, norm: float) -> None:
    tensor = BadTensor("w", (len(values),), tuple(values[:5]), 1, len(values))
    lines = banner_lines("GPU0", step, loss, norm, [tensor])
    assert not any("\n" in line for line in lines)
    assert lines[3] == f"Step: {step}"
    assert tensor.values_text.endswith(", ...]") == (len(values) > 5)
