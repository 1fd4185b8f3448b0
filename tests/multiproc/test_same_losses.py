"""The same global batch gives the same losses, however it is cut into ranks and micro-batches."""

from __future__ import annotations

import pytest

from tests.conftest import Outcome, Shell

GLOBAL_BATCH = 8
STEPS = 6

# fp32 sums of the same terms in another order: a relative rounding error of 2**-24 each, over a few hundred terms in
# the loss and six optimizer steps. 2e-5 is 30 times less than what one swapped sample changes here (see the last test).
TOLERANCE = 2e-5


def train(shell: Shell, ranks: int, accumulation: int, seed: int = 42) -> Outcome:
    micro = GLOBAL_BATCH // (ranks * accumulation)
    done = shell.train(
        "--nproc",
        str(ranks),
        "--set",
        f"training.grad_accum_nums={accumulation}",
        "--set",
        f"training.batch_size={micro}",
        "--set",
        "training.learning_rate=1e-3",
        "--set",
        f"system.seed={seed}",
        "--max-steps",
        str(STEPS),
    )
    assert done.code == 0, done.err
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "accumulation"),
    [
        (2, 1),
        (1, 2),
        (1, 4),
        (2, 2),
        (2, 4),
        (4, 1),
        (4, 2),
    ],
)
def test_ranks_and_accumulation_do_not_change_the_losses(shell: Shell, ranks: int, accumulation: int) -> None:
    reference = train(shell, 1, 1)
    cut = train(shell, ranks, accumulation)
    assert cut.losses() == pytest.approx(reference.losses(), rel=TOLERANCE)
    norms = [r["grad_norm"] for r in reference.metrics()]
    assert [r["grad_norm"] for r in cut.metrics()] == pytest.approx(norms, rel=1e-3)
    assert [r["tokens"] for r in cut.metrics()] == [r["tokens"] for r in reference.metrics()]


@pytest.mark.slow
def test_the_tolerance_would_see_other_samples(shell: Shell) -> None:
    first, other = train(shell, 1, 1), train(shell, 1, 1, seed=43)
    apart = max(abs(a - b) / a for a, b in zip(first.losses(), other.losses(), strict=True))
    assert apart > 5 * TOLERANCE
