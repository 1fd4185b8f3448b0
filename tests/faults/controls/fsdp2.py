"""FSDP2 with mixed precision off, gradient clipping and a sharded save through DCP."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 64)
        self.down = torch.nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        loss = model(torch.randn(4, 16)).pow(2).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if step == 10:
            folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(folder)
            dcp.save(get_model_state_dict(model), checkpoint_id=os.path.join(folder[0], "step10"))
    print(f"RESULT {dist.get_rank()} {loss.item()!r} {norm.full_tensor().item()!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
