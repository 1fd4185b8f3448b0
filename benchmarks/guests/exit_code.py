"""A script that exits with its own exit code."""

import sys

import torch
import torch.distributed as dist
from loop import train
from model import Net
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(Net())
train(model).close(model.module.state_dict())
dist.barrier()
dist.destroy_process_group()
sys.exit(3)
