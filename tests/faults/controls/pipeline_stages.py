"""Two pipelines of two stages: the second stage is slow, so ranks wait in different groups all the time."""

import os
import time

import torch
import torch.distributed as dist

PAUSE = float(os.environ.get("CONTROL_PAUSE", "8"))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage, replica = rank // 2, rank % 2
    torch.manual_seed(stage)  # both replicas of a stage begin alike
    data_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = torch.nn.Linear(8, 8)
    torch.manual_seed(rank)
    opt = torch.optim.SGD(layer.parameters(), lr=0.05)
    for step in range(30):
        if stage == 0:
            x = torch.randn(4, 8)
            out = layer(x)
            dist.send(out.detach(), rank + 2)
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 2)
            out.backward(grad)
        else:
            x = torch.empty(4, 8)
            dist.recv(x, rank - 2)
            x.requires_grad_()
            if step == 10 and replica == 1:
                time.sleep(PAUSE)
            loss = layer(x).pow(2).mean()
            loss.backward()
            dist.send(x.grad, rank - 2)
        for p in layer.parameters():
            dist.all_reduce(p.grad, group=data_groups[stage])
        opt.step()
        opt.zero_grad()
    print("RESULT", rank, repr(layer.weight.sum().item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
