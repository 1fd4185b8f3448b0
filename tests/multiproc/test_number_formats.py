"""fp32, bf16 and fp16 under every layout: each follows the fp32 curve of one rank, and fp16 scales its loss.

Ranks are forked, not launched; the layouts that `test_parity_layouts` runs through the command line are here again, so
that the table is whole.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model_check import load_config
from model_check.engine.arrangement import arrange_llama
from model_check.engine.optimizer import build_optimizer
from model_check.engine.place import Place
from model_check.engine.precision import INITIAL_SCALE
from model_check.engine.step import TrainStep
from model_check.plan.layout import data_rank
from tests.models.test_models_parallelize import on_ranks

LAYOUTS = {
    "single": (1, ("parallel.strategy=ddp",)),
    "ddp 2": (2, ("parallel.strategy=ddp",)),
    "fsdp 2": (2, ("parallel.strategy=fsdp",)),
    "hsdp 2×2": (4, ("parallel.strategy=hsdp", "parallel.shard=2")),
    "tp 2": (2, ("parallel.tensor=2",)),
    "pp 2": (2, ("parallel.pipeline=2",)),
    "cp 2": (2, ("parallel.context=2",)),
    "fsdp+tp 2×2": (4, ("parallel.strategy=fsdp", "parallel.tensor=2")),
    "pp+fsdp 2×2": (4, ("parallel.strategy=fsdp", "parallel.pipeline=2")),
    "pp+tp 2×2": (4, ("parallel.pipeline=2", "parallel.tensor=2")),
}
# A fresh model's logits are tenths; half precision is off by 2**-9 (bf16) or 2**-12 (fp16) of them, in a loss near 4:
# up to 1e-4 and 1e-5 (5e-5 and 1.3e-5 were seen). Other samples or other weights change it by a hundredth.
TOLERANCE = {"fp32": 2e-5, "bf16": 4e-4, "fp16": 5e-5}
STEPS = 3
BATCH = 4
TOKENS = torch.randint(0, 64, (STEPS, BATCH, 17), generator=torch.Generator().manual_seed(0))
# Beyond the largest number of fp16 whatever the gradient.
TOO_LARGE = 2.0**80


def curves(rank: int, world: int, keys: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for precision in TOLERANCE:
        config = load_config(preset="debug", overrides=[f"training.precision={precision}", *keys])
        place = Place(rank, world)
        arranged = arrange_llama(config, place, 64)
        step = TrainStep(
            arranged.model,
            build_optimizer(arranged.bare_model, config.training),
            arranged.precision,
            place,
            max_grad_norm=1.0,
            passes=arranged.passes,
            norm_of=arranged.norm_of,
            losses_in_job=arranged.losses_in_job,
        )
        batches = [micro_batches(config, tokens, rank, world) for tokens in TOKENS]
        found[precision] = [step(micro, 1e-3)[0].item() for micro in batches]
        if precision == "fp16":
            found["overflow"] = after_an_overflow(step, batches[0])
        else:
            assert step.loss_scale.scale.item() == 1.0
    return found


def micro_batches(config: Any, tokens: torch.Tensor, rank: int, world: int) -> list[Any]:
    """This rank's share of four samples, one by one; of each the slice that its context rank computes."""
    from model_check.engine.feed import context_cut

    parallel = config.data_parallel(world)
    mine = tokens[data_rank(config, rank, world) :: parallel]
    length = tokens.shape[1] - 1
    config = config.with_values({"training.context_length": length}, "test")
    cut = context_cut(config, rank)
    whole = [make_batch(row[None, :-1], row[None, 1:]) for row in mine]
    return [cut(batch) for batch in whole]


def make_batch(tokens: torch.Tensor, targets: torch.Tensor) -> Any:
    from model_check.data.loader import Batch

    return Batch(tokens.contiguous(), targets.contiguous(), torch.zeros(1, dtype=torch.int64), None, None)


def after_an_overflow(step: TrainStep, batch: list[Any]) -> SimpleNamespace:
    """A step whose scale is far too large: what it did to the weights, the scale, and what it said."""
    before = [p.detach().clone() for p in step.model.parameters()]
    scale = step.loss_scale.scale.item()
    step.loss_scale.scale.fill_(TOO_LARGE)
    skipped = step(batch, 1e-3)[2].item()
    unchanged = all(
        torch.equal(local(a), local(b.detach())) for a, b in zip(before, step.model.parameters(), strict=True)
    )
    return SimpleNamespace(
        scale=scale, skipped=skipped, unchanged=unchanged, halved=step.loss_scale.scale.item() == TOO_LARGE / 2
    )


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.fixture(scope="module")
def reference() -> list[float]:
    world, keys = LAYOUTS["single"]
    curve: list[float] = on_ranks(world, lambda rank: curves(rank, world, keys)["fp32"])[0]
    return curve


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_format_follows_fp32(layout: str, reference: list[float]) -> None:
    world, keys = LAYOUTS[layout]
    assert len(set(reference)) == STEPS
    for found in on_ranks(world, lambda rank: curves(rank, world, keys)):
        for precision, tolerance in TOLERANCE.items():
            assert found[precision] == pytest.approx(reference, rel=tolerance), precision
        for half in ("bf16", "fp16"):
            assert found[half] != found["fp32"], f"{half} computed in fp32"
        overflow = found["overflow"]
        assert overflow.scale == INITIAL_SCALE
        assert (overflow.skipped, overflow.unchanged, overflow.halved) == (1.0, True, True)
