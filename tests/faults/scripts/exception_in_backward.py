"""A custom autograd function fails in backward, far below the script's call."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bits):
        ctx.bits = bits
        return (x * 2**bits).round() / 2**bits

    @staticmethod
    def backward(ctx, grad):
        if ctx.bits > 8:
            faultclock.fired()
            raise RuntimeError(f"no backward for {ctx.bits} bits")  # FAULT
        return grad, None


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
for step in range(50):
    bits = 16 if step == 11 and dist.get_rank() == 0 else 8
    Quantize.apply(model(torch.randn(2, 8)), bits).mean().backward()  # FAULT-ALSO
