"""FSDP2: the full state dict is gathered on rank 0 only."""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import faultclock


class Block(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = torch.nn.Linear(dim, 4 * dim)
        self.down = torch.nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def gather_weights(model):
    faultclock.fired()
    return {name: p.full_tensor() for name, p in model.named_parameters()}  # FAULT


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(Block(16), Block(16))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(30):
        model(torch.randn(4, 16)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
        if step == 10 and dist.get_rank() == 0:
            torch.save(gather_weights(model), tempfile.mktemp(suffix=".pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
