"""DDP's buckets, laid out once and for all before the first step.

DDP starts with one bucket for everything and cuts it into buckets of 25 MB after the first step, in the order in which
gradients arrived. An all-reduce of more than two ranks adds in an order that depends on an element's place in its
bucket, so the first step after a resume would round differently from the same step of an undisturbed run. Here the
cutting happens before any step, in reverse order of the parameters, which is how gradients arrive but for neighbours
inside a layer: the overlap of communication and backward is the same, and every step of every run adds in one order.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel


def pin_buckets(model: DistributedDataParallel) -> None:
    """Collective. One backward pass of zeros shows DDP the order; it costs one exchange of gradients."""
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    model.reducer.prepare_for_forward()
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        # Backward walks this chain from its end: the last parameter's gradient arrives first.
        total = total + parameter.reshape(-1)[0].float() * 0
    model.reducer.prepare_for_backward([])
    total.backward()
    if not model.reducer._rebuild_buckets():
        raise AssertionError("DDP did not lay out its buckets after a backward pass")
    for parameter in parameters:
        parameter.grad = None
