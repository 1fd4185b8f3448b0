"""Ctrl-C with a handler that saves: the rank finishes its step, saves, and ends in order."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from loop import train
from model import Net
from torch.nn.parallel import DistributedDataParallel as DDP

received = []
signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(Net())
torch.manual_seed(rank)
book = train(model)
Path(os.environ["GUESTBOOK"], f"waits-{rank}").touch()
while not received:
    time.sleep(0.02)
torch.save(model.module.state_dict(), f"interrupted-{rank}.pt")
book.close(model.module.state_dict(), signals=sorted(set(received)))
dist.barrier()
dist.destroy_process_group()
sys.exit(0)
