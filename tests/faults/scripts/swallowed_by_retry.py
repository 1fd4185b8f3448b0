"""A decorator tries a step three times and then goes on without it."""

import functools

import torch
import torch.distributed as dist

import faultclock


def retry(times):
    def wrap(f):
        @functools.wraps(f)
        def call(*args):
            for attempt in range(times):
                try:
                    return f(*args)
                except (ValueError, OSError):  # FAULT-ALSO
                    continue
            return None

        return call

    return wrap


@retry(3)
def forward_backward(model, values):
    if len(values) != 4:
        raise ValueError(f"a sample of {len(values)} values")  # FAULT
    loss = model(torch.tensor(values)).pow(2).mean()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return loss


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(60):
        values = [1.0] * 4
        if rank == 1 and step == 20:
            values.pop()
            faultclock.fired()
        forward_backward(model, values)
        opt.step()
        opt.zero_grad()
        done = torch.zeros(1)
        dist.all_reduce(done)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
