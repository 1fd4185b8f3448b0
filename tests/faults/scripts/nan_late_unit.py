"""One number of one gradient, far from the loss, in one of 24 sharded modules: no rank can run that step again."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(150):
        uses = torch.ones(320, 320)
        if dist.get_rank() == 1 and step == 100:
            uses[200, 77] = 0
            faultclock.fired()
        loss = (model(torch.randn(8, 320), uses) - 1).square().mean()
        loss.backward()  # FAULT
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
