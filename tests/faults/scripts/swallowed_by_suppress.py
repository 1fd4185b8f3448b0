"""contextlib.suppress around a part of the step that holds a collective."""

import contextlib

import torch
import torch.distributed as dist

import faultclock


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(40):
        sample = {"x": torch.randn(3, 4)}
        if rank == 2 and step == 15:
            sample = {"y": 1}
            faultclock.fired()
        with contextlib.suppress(KeyError):  # FAULT-ALSO
            x = sample["x"]  # FAULT
            loss = model(x).pow(2).mean()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()
        dist.broadcast(torch.ones(1), 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
