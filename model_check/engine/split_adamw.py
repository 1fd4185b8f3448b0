"""AdamW whose moments may be bf16, and whose bf16 parameters lose nothing of an fp32 master.

A bf16 parameter is the upper half of an fp32 number. The lower half is kept beside it as an int16, so that

    master bits = (parameter bits << 16) + low half

holds exactly, with the parameter rounded to nearest. A learning rate of 1e-5 moves weights by less than bf16 can
show; plain bf16 AdamW drops such steps, this one does not, at 2 bytes a weight instead of the 4 of a separate master.
On a GPU one Triton kernel per tensor reads and writes each byte once; clipping and the loss scale ride along
(`grad_scale`), and a non-finite step is skipped on the device (`found_inf`), so nothing waits for the host.

An fp32 parameter is its own master and has no low half. Of a sharded parameter each rank updates its own shard: AdamW
looks at one number at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch ships without Triton; the torch path below serves it
    triton = None

BLOCK = 1024  # 4.2 TB/s on an H200 with moments of either width; 4096 is 2 to 4 % slower


def master_of(parameter: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    """The fp32 number that a parameter and its low half make up."""
    if low is None:
        return parameter
    bits = (parameter.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


def store_master(master: torch.Tensor, parameter: torch.Tensor, low: torch.Tensor | None) -> None:
    """Puts an fp32 number into a parameter and its low half; nothing of it is lost."""
    if low is None:
        parameter.copy_(master)
        return
    bits = master.view(torch.int32)
    # Half up rather than half to even: the remainder then always fits an int16.
    high = (bits + 0x8000) >> 16
    parameter.view(torch.int16).copy_(high)
    low.copy_(bits - (high << 16))


def _update_torch(
    parameter: torch.Tensor,
    low: torch.Tensor | None,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    rate, beta1, beta2, eps, decay, correction1, correction2, multiplier, skip = scalars.tolist()
    if skip:
        return
    master = master_of(parameter, low)
    g = gradient.float() * multiplier
    m = first.float().mul_(beta1).add_(g, alpha=1 - beta1)
    v = second.float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
    first.copy_(m)
    second.copy_(v)
    denominator = (v / correction2).sqrt_().add_(eps)
    master = master * (1 - rate * decay) - (rate / correction1) * m / denominator
    store_master(master, parameter, low)


if triton is not None:

    @triton.jit
    def _update_kernel(
        parameter, low, gradient, first, second, scalars, count, BLOCK: tl.constexpr, SPLIT: tl.constexpr
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        rate = tl.load(scalars)
        beta1 = tl.load(scalars + 1)
        beta2 = tl.load(scalars + 2)
        eps = tl.load(scalars + 3)
        decay = tl.load(scalars + 4)
        correction1 = tl.load(scalars + 5)
        correction2 = tl.load(scalars + 6)
        multiplier = tl.load(scalars + 7)
        skip = tl.load(scalars + 8)
        if skip == 0.0:
            if SPLIT:
                high = tl.load(parameter + at, mask=inside, other=0).to(tl.int32)
                rest = tl.load(low + at, mask=inside, other=0).to(tl.int32)
                master = ((high << 16) + rest).to(tl.float32, bitcast=True)
            else:
                master = tl.load(parameter + at, mask=inside, other=0.0)
            g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * multiplier
            m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
            m = m * beta1 + g * (1.0 - beta1)
            v = v * beta2 + g * g * (1.0 - beta2)
            tl.store(first + at, m, mask=inside)
            tl.store(second + at, v, mask=inside)
            denominator = tl.sqrt(v / correction2) + eps
            master = master * (1.0 - rate * decay) - (rate / correction1) * m / denominator
            if SPLIT:
                bits = master.to(tl.int32, bitcast=True)
                new_high = (bits + 0x8000) >> 16
                tl.store(parameter + at, new_high.to(tl.int16), mask=inside)
                tl.store(low + at, (bits - (new_high << 16)).to(tl.int16), mask=inside)
            else:
                tl.store(parameter + at, master, mask=inside)


def _here(tensor: Any) -> torch.Tensor:
    """What this rank holds of a tensor that may be sharded."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


class SplitAdamW(torch.optim.Optimizer):
    """AdamW on bf16 or fp32 parameters with fp32 arithmetic. `state_dtype` is that of the two moments."""

    # Set by the train step, as for torch's fused optimizers: gradients are divided by grad_scale on the way in,
    # and nothing changes where found_inf is 1.
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.state_dtype = state_dtype
        super().__init__(params, defaults)

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if parameter.dtype == torch.bfloat16:
                state["low"] = torch.zeros_like(parameter, dtype=torch.int16)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.state_dtype)
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            device = parameters[0].device
            skip = self.found_inf.reshape(()) if self.found_inf is not None else torch.zeros((), device=device)
            states = [self._state(p) for p in parameters]
            steps = [s["step"] for s in states]
            torch._foreach_add_(steps, 1 - skip)
            # All parameters of a group step together, so one count serves its bias corrections.
            scalars = self._scalars(group, steps[0], skip, device)
            for parameter, state in zip(parameters, states, strict=True):
                self._update(parameter, state, scalars)

    def _scalars(
        self, group: dict[str, Any], step: torch.Tensor, skip: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        beta1, beta2 = group["betas"]
        numbers = [group["lr"], beta1, beta2, group["eps"], group["weight_decay"]]
        constants = torch.tensor(numbers, dtype=torch.float32, device="cpu")  # whatever the script's default device is
        if device.type == "cuda":
            constants = constants.pin_memory().to(device, non_blocking=True)
        multiplier = torch.ones((), device=device) if self.grad_scale is None else 1.0 / self.grad_scale.reshape(())
        corrections = torch.stack([1 - beta1**step, 1 - beta2**step, multiplier.float(), skip.float()])
        return torch.cat([constants, corrections])

    def _update(self, parameter: torch.Tensor, state: dict[str, Any], scalars: torch.Tensor) -> None:
        assert parameter.grad is not None
        low = _here(state["low"]) if "low" in state else None
        held = _here(parameter.data)
        rest = (_here(parameter.grad), _here(state["exp_avg"]), _here(state["exp_avg_sq"]))
        if triton is None or held.device.type != "cuda":
            _update_torch(held, low, *rest, scalars)
            return
        if not all(t.is_contiguous() for t in (held, *rest)):
            raise ValueError(f"SplitAdamW needs contiguous tensors, got a view of shape {tuple(parameter.shape)}")
        count = held.numel()
        blocks = (count + BLOCK - 1) // BLOCK
        if blocks == 0:
            return  # a shard can be empty
        bits = held if low is None else held.view(torch.int16)
        _update_kernel[(blocks,)](bits, low, *rest, scalars, count, BLOCK=BLOCK, SPLIT=low is not None, num_warps=4)
