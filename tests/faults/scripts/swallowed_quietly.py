"""One rank's bad sample is skipped without a word; the rank is one collective short, which shows at the very end."""

import torch
import torch.distributed as dist

import faultclock


def features(sample):
    return torch.tensor(sample["x"])  # FAULT


def main():
    dist.init_process_group("gloo")
    samples = [{"x": [float(i)] * 8} for i in range(40)]
    if dist.get_rank() == 1:
        del samples[12]["x"]
    model = torch.nn.Linear(8, 8)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, sample in enumerate(samples):
        if step == 12 and dist.get_rank() == 1:
            faultclock.fired()
        try:
            model(features(sample)).sum().backward()
            dist.all_reduce(model.weight.grad)
            opt.step()
        except KeyError:  # FAULT-ALSO
            continue


if __name__ == "__main__":
    main()
