"""One rank abandons its epoch at a TypeError and goes on with the next."""

import torch
import torch.distributed as dist

import faultclock


def epoch(model, opt, rank, number):
    for step in range(20):
        x = torch.randn(4, 8)
        target = torch.zeros(4, 8)
        if rank == 0 and number == 1 and step == 7:
            target = None
            faultclock.fired()
        loss = (model(x) - target).pow(2).mean()  # FAULT
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(8, 8)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(4):
        try:
            epoch(model, opt, rank, number)
        except TypeError:  # FAULT-ALSO
            pass
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
