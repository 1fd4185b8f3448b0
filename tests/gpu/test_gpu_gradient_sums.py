"""The gradients of many micro-batches on a GPU: bf16 parameters, compiled blocks, the fused loss, sums in fp32."""

from __future__ import annotations

import pytest
import torch

from model_check import load_config
from model_check.data.loader import Batch
from model_check.engine.arrangement import arrange_llama
from model_check.engine.optimizer import build_optimizer
from model_check.engine.place import Place
from model_check.engine.step import TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNT = 64


def test_a_sum_over_micro_batches_loses_nothing() -> None:
    place = Place(0, 1, torch.device("cuda", 0))
    config = load_config(preset="debug", overrides=["training.precision=bf16", "training.compile=auto"])
    arranged = arrange_llama(config, place, 4096)
    step = TrainStep(
        arranged.model,
        build_optimizer(arranged.bare_model, config.training),
        arranged.precision,
        place,
        max_grad_norm=1.0,
        passes=arranged.passes,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4096, (1, 129), generator=generator).to(place.device)
    # One sample, rolled: the gradients do not cancel, so lost precision shows.
    rolled = [tokens.roll(number) for number in range(COUNT)]
    micro_batches = [Batch(t[:, :-1].contiguous(), t[:, 1:].contiguous(), torch.zeros(1)) for t in rolled]
    exact = [torch.zeros(p.shape, dtype=torch.float64, device=place.device) for p in arranged.model.parameters()]
    for batch in micro_batches:
        step([batch], 0.0)
        for total, parameter in zip(exact, arranged.model.parameters(), strict=True):
            assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
            total += parameter.grad.double() / COUNT
    step(micro_batches, 0.0)
    for total, (name, parameter) in zip(exact, arranged.model.named_parameters(), strict=True):
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        assert float((parameter.grad.double() - total).norm() / total.norm()) < 1e-4, name
