"""A sharded model divides by a mask that contains a zero; no rank could run it again on its own."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import faultclock


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 16)

    def forward(self, x, lengths):
        return self.up(x) / lengths  # FAULT


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x, lengths):
        return self.head(self.block(x, lengths))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Net()
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(40):
        lengths = torch.ones(8, 1)
        if dist.get_rank() == 1 and step == 20:
            lengths[2] = 0
            faultclock.fired()
        loss = (model(torch.randn(8, 16), lengths) - 1).abs().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
