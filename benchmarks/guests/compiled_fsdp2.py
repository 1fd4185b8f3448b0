"""torch.compile over a model sharded by FSDP2."""

import torch
import torch.distributed as dist
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
train(torch.compile(net)).close(net.state_dict())
dist.destroy_process_group()
