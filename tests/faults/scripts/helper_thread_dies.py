"""A prefetching thread of rank 1 dies of a bad record; the main thread waits for its next batch for ever."""

import queue
import threading

import torch
import torch.distributed as dist

import faultclock


def prefetch(batches, rank):
    for index in range(40):
        record = {"x": [1.0] * 8} if rank == 0 or index != 12 else {}
        if not record:
            faultclock.fired()
        batches.put(torch.tensor(record["x"]))  # FAULT


def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = queue.Queue(maxsize=2)
    threading.Thread(target=prefetch, args=(batches, dist.get_rank()), name="prefetch", daemon=True).start()
    for _ in range(40):
        model(batches.get()).sum().backward()  # FAULT-ALSO
        dist.all_reduce(model.weight.grad)
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
