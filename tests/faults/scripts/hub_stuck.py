"""One rank asks the hub for a tokenizer and the connection hangs."""

import torch
import torch.distributed as dist
from huggingface_hub import hf_hub_download

import faultclock

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
for step in range(50):
    model(torch.randn(2, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
    if step == 12:
        if dist.get_rank() == 1:
            faultclock.fired()
            hf_hub_download("someone/tiny-tokenizer", "tokenizer.json")  # FAULT
        dist.barrier()
