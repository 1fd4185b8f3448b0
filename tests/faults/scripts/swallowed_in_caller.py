"""A bad record raises inside the step function; the caller silently ignores it."""

import torch
import torch.distributed as dist

import faultclock


def parse(record):
    return torch.tensor([float(v) for v in record.split(",")])  # FAULT


def step(model, opt, record):
    x = parse(record)
    loss = model(x).pow(2).mean()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    opt.step()
    opt.zero_grad()


def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    records = ["1,2,3,4"] * 40
    if dist.get_rank() == 1:
        records[12] = "1,2,x,4"
    for number, record in enumerate(records):
        if number == 12 and dist.get_rank() == 1:
            faultclock.fired()
        try:
            step(model, opt, record)
        except Exception:  # FAULT-ALSO
            pass
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
