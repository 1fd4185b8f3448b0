"""DDP over torch.compile."""

import torch
import torch.distributed as dist
from loop import train
from model import Net
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
model = DDP(torch.compile(net))
torch.manual_seed(dist.get_rank())
train(model).close(net.state_dict())
dist.barrier()
dist.destroy_process_group()
