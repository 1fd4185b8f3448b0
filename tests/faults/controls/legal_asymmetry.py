"""The same collectives from different lines: rank 0 has its own branch, its own helper, its own extra work."""

import torch
import torch.distributed as dist


def reduce_with_log(loss, log):
    dist.all_reduce(loss)
    log.append(loss.item())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = torch.nn.Linear(8, 8)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    for step in range(60):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        if rank == 0:
            for p in reversed(list(reversed(list(model.parameters())))):
                dist.all_reduce(p.grad)
        else:
            dist.all_reduce(model.weight.grad)
            dist.all_reduce(model.bias.grad)
        opt.step()
        opt.zero_grad()
        value = loss.detach().clone()
        if rank == 0:
            reduce_with_log(value, log)
            plan = torch.tensor([step])
            dist.broadcast(plan, src=0)
        else:
            dist.all_reduce(value)
            received = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(received, src=0)
    print("RESULT", rank, repr(value.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
