"""One number of one gradient, far from the loss, in one of 24 buckets: no other gradient of its step feels it."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class PerUse(torch.autograd.Function):
    """A weight whose gradient is divided by how often each of its numbers was used."""

    @staticmethod
    def forward(ctx, weight, uses):
        ctx.save_for_backward(uses)
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        (uses,) = ctx.saved_tensors
        return torch.where(uses > 0, gradient, 0.0) / uses, None


class Layer(torch.nn.Linear):
    def forward(self, x, uses):
        return x + torch.tanh(torch.nn.functional.linear(x, PerUse.apply(self.weight, uses), self.bias))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(320, 320) for _ in range(24))

    def forward(self, x, uses):
        for number, layer in enumerate(self.layers):
            x = layer(x, uses if number == 2 else torch.ones_like(uses))
        return x


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Net(), bucket_cap_mb=0.25)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(150):
        uses = torch.ones(320, 320)
        if dist.get_rank() == 1 and step == 100:
            uses[200, 77] = 0
            faultclock.fired()
        loss = (model(torch.randn(8, 320), uses) - 1).square().mean()  # FAULT
        loss.backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
