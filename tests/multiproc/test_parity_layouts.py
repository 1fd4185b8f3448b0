"""The same seed and global batch give the same loss curve under every layout: `python benchmarks/parity.py` as tests.

Each case is a job of its own under the launcher and the black box, which must not find anything either.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parity import LAYOUTS, NORM_TOLERANCE, REFERENCE, TOLERANCE, Case, Curve, distance, train

STEPS = 5
QUICK = ("FSDP 2",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all cases: they share the prepared data."""
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Curve:
    return train(REFERENCE, folder, STEPS)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[] if c.name in QUICK else [pytest.mark.slow]) for c in LAYOUTS],
)
def test_a_layout_does_not_change_the_losses(case: Case, folder: Path, reference: Curve) -> None:
    curve = train(case, folder, STEPS)
    assert len(set(reference.losses)) == STEPS, "a curve that does not move proves nothing"
    assert distance(curve.losses, reference.losses) < TOLERANCE
    assert distance(curve.norms, reference.norms) < NORM_TOLERANCE


# A gradient of half precision carries a relative error of 2**-8 (bf16) or 2**-11 (fp16), which AdamW turns into that
# share of a step; a step moves this loss by about 2 %.
HALF_TOLERANCE = {"bf16": 1e-3, "fp16": 2e-4}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["DDP 2", "FSDP 2", "FSDP+TP 2×2", "PP 2"])
def test_half_precision_follows_the_fp32_curve(layout: str, precision: str, folder: Path, reference: Curve) -> None:
    case = next(case for case in LAYOUTS if case.name == layout)
    half = Case(f"{layout} {precision}", case.ranks, (*case.keys, f"training.precision={precision}"))
    apart = distance(train(half, folder, STEPS).losses, reference.losses)
    assert 0 < apart < HALF_TOLERANCE[precision]


@pytest.mark.slow
def test_the_tolerance_would_see_other_weights(folder: Path, reference: Curve) -> None:
    other = train(Case("another seed", 2, ("parallel.strategy=fsdp", "system.seed=43")), folder, STEPS)
    assert distance(other.losses, reference.losses) > 5 * TOLERANCE
