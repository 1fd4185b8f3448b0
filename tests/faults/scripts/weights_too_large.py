"""An initialisation without its square root: the first forward overflows."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(16))
        for layer in self.layers:
            torch.nn.init.normal_(layer.weight, std=64.0)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))  # FAULT
        return x


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Deep())
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    faultclock.fired()
    for _ in range(30):
        loss = model(torch.randn(4, 64)).pow(2).mean()  # FAULT-ALSO
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
