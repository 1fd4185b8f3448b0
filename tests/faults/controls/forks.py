"""Forks helpers by hand and through multiprocessing while training."""

import multiprocessing as mp
import os

import torch
import torch.distributed as dist


def square(x):
    return x * x


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    total = 0
    with mp.get_context("fork").Pool(2) as pool:
        for step in range(30):
            model(torch.randn(2, 4)).pow(2).mean().backward()
            dist.all_reduce(model.weight.grad)
            with torch.no_grad():
                model.weight -= 0.05 * model.weight.grad
            model.zero_grad()
            total += sum(pool.map(square, range(step)))
            if step == 10:
                child = os.fork()
                if child == 0:
                    os._exit(5)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    print("RESULT", dist.get_rank(), total, repr(model.weight.sum().item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
