"""Three ranks broadcast a schedule in every step; once, the middle rank believes that it already has it."""

import torch
import torch.distributed as dist

import faultclock


def share(schedule, rank, step):
    skips = rank == 1 and step == 14
    if skips:
        faultclock.fired()
    if not (rank == 1 and step == 14):
        dist.broadcast(schedule, 0)
    return schedule


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(40):
        rate = share(torch.ones(1), rank, step)
        net(torch.randn(8, 16)).pow(2).mean().backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)  # FAULT
        opt.param_groups[0]["lr"] = 0.01 * rate.item()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
