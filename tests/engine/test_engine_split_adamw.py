"""The split optimizer must be fp32 AdamW to the last bit it promises: the bf16 parameter plus its low half."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from model_check.engine.split_adamw import SplitAdamW, master_of, store_master

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


@given(st.lists(FLOATS, min_size=1, max_size=32))
def test_high_and_low_half_hold_every_fp32_number_exactly(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    parameter = torch.empty_like(master, dtype=torch.bfloat16)
    low = torch.empty_like(master, dtype=torch.int16)
    store_master(master, parameter, low)
    assert torch.equal(master_of(parameter, low), master)
    nearest = master.to(torch.bfloat16)
    # Half up instead of half to even: at most one unit in the last place apart, and only on ties.
    apart = (parameter.view(torch.int16).int() - nearest.view(torch.int16).int()).abs()
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.all((apart == 0) | (ties & (apart == 1)))


def test_a_hundred_steps_match_fp32_adamw() -> None:
    torch.manual_seed(0)
    start = (torch.randn(64, 32) * 0.02).to(torch.bfloat16)
    ours = torch.nn.Parameter(start.clone())
    reference = torch.nn.Parameter(start.float())
    options = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    split = SplitAdamW([ours], **options)
    adamw = torch.optim.AdamW([reference], foreach=False, **options)
    for _ in range(100):
        gradient = torch.randn(64, 32).to(torch.bfloat16)
        ours.grad, reference.grad = gradient.clone(), gradient.float()
        split.step()
        adamw.step()
    master = master_of(ours.data, split.state[ours]["low"])
    # Both round to fp32 after each operation but group the products differently: a few units in the last place of
    # the largest weight, accumulated over a hundred steps.
    assert torch.allclose(master, reference.data, rtol=0, atol=5e-8)
    assert (reference.data - start.float()).abs().max() > 5e-5, "the reference must have moved"


def test_plain_bf16_adamw_would_have_lost_these_steps() -> None:
    start = torch.full((256,), 0.5, dtype=torch.bfloat16)
    plain, ours, fp32 = (torch.nn.Parameter(t) for t in (start.clone(), start.clone(), start.float()))
    options = {"lr": 1e-5, "weight_decay": 0.0, "eps": 1e-8, "betas": (0.9, 0.95)}
    optimizers = (
        torch.optim.AdamW([plain], **options),
        SplitAdamW([ours], **options),
        torch.optim.AdamW([fp32], **options),
    )
    for _ in range(200):
        for parameter, optimizer in zip((plain, ours, fp32), optimizers, strict=True):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert torch.equal(plain.data, start), "bf16 cannot show a step of 1e-5 at 0.5"
    master = master_of(ours.data, optimizers[1].state[ours]["low"])
    assert (start.float() - master).min() > 1.9e-3
    # One rounding of half a unit in the last place of 0.5 a step.
    assert torch.allclose(master, fp32.data, rtol=0, atol=200 * 2**-25)


def test_gradients_are_divided_by_the_scale_and_skipped_when_not_finite() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    twin = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    scaled, plain = SplitAdamW([parameter], lr=0.1), SplitAdamW([twin], lr=0.1)
    parameter.grad, twin.grad = torch.full_like(parameter, 8.0), torch.full_like(twin, 2.0)
    scaled.grad_scale = torch.tensor(4.0)
    scaled.step()
    plain.step()
    assert torch.equal(parameter.data, twin.data)
    before = parameter.data.clone()
    scaled.found_inf = torch.tensor(1.0)
    scaled.step()
    assert torch.equal(parameter.data, before)
    assert scaled.state[parameter]["step"].item() == 1.0
