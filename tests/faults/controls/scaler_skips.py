"""A GradScaler that overflows now and then, leaves the step out, and goes on with half the factor: as it should."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**122, growth_interval=4)
    scales = []
    for _ in range(80):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 16)) * 40, torch.randint(0, 4, (8,)))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scales.append(scaler.get_scale())
    skipped = sum(after < before for before, after in zip(scales, scales[1:]))
    print(f"RESULT {dist.get_rank()} {skipped > 3} {scales[-1]!r} {loss.item()!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
