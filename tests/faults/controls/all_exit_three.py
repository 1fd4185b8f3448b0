"""Every rank ends with exit code 3, on purpose."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
value = torch.ones(3)
for _ in range(10):
    dist.all_reduce(value)
    value /= dist.get_world_size()
print("RESULT", dist.get_rank(), value.tolist(), flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(3)
