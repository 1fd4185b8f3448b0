"""Background threads: a prefetcher, a logger, and one that reduces over a group of its own."""

import queue
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def prefetch(out, count):
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        out.put(torch.randn(4, 8, generator=generator))
    out.put(None)


def monitor(group, beats, rounds):
    for _ in range(rounds):
        beat = torch.ones(1)
        dist.all_reduce(beat, group=group)
        beats.append(beat.item())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    side_group = dist.new_group()
    beats, batches = [], queue.Queue(maxsize=4)
    workers = [
        threading.Thread(target=prefetch, args=(batches, 120)),
        threading.Thread(target=monitor, args=(side_group, beats, 200)),
    ]
    for w in workers:
        w.start()
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    while (batch := batches.get()) is not None:
        loss = model(batch).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    for w in workers:
        w.join()
    print("RESULT", dist.get_rank(), sum(beats), repr(loss.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
