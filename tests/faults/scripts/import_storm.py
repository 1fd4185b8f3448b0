"""Four ranks import everything at once on a small machine."""

import faultclock

faultclock.fired()
import datasets  # noqa: F401  # FAULT-ALSO
import lightning  # noqa: F401  # FAULT
import torch
import torch.distributed as dist
import transformers  # noqa: F401  # FAULT-ALSO
from transformers import LlamaForCausalLM, Trainer  # noqa: F401  # FAULT-ALSO

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
for _ in range(20):
    model(torch.randn(2, 4)).sum().backward()
    dist.all_reduce(model.weight.grad)
