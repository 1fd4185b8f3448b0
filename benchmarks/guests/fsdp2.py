"""FSDP2: each block is a unit, and the model around them; a sharded checkpoint at the end."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loop import train
from model import Net
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
for block in net.blocks:
    fully_shard(block)
fully_shard(net)
torch.manual_seed(dist.get_rank())
train(net).close(net.state_dict())
dcp.save(net.state_dict(), checkpoint_id="checkpoint")
dist.destroy_process_group()
