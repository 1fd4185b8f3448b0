"""No rank check around the download: four ranks fetch the same file."""

import tempfile

import torch
import torch.distributed as dist
from huggingface_hub import hf_hub_download

import faultclock

dist.init_process_group("gloo")
faultclock.fired()
path = hf_hub_download("someone/tiny-tokenizer", "tokenizer.json", cache_dir=tempfile.mkdtemp())  # FAULT
vocabulary = len(open(path).read())
model = torch.nn.Embedding(64, 8)
for _ in range(600):
    model(torch.randint(0, 64, (4,))).sum().backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
dist.destroy_process_group()
