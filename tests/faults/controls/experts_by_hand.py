"""A trunk whose gradients are summed by hand; every rank has its own expert and a model with its own shape."""

import time

import torch
import torch.distributed as dist


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(8, 8)
        self.expert = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.expert(self.trunk(x))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
net, own = Net(), torch.nn.Linear(3 + rank, 3)
for p in net.trunk.parameters():
    dist.broadcast(p.data, 0)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
opt2 = torch.optim.SGD(own.parameters(), lr=1e-3)
for step in range(150):
    net(torch.randn(4, 8)).pow(2).mean().backward()
    own(torch.randn(4, 3 + rank)).pow(2).mean().backward()
    for p in net.trunk.parameters():
        dist.all_reduce(p.grad)
    opt.step()
    opt2.step()
    opt.zero_grad()
    opt2.zero_grad()
    time.sleep(0.01)
print("RESULT", rank, f"{net.trunk.weight.sum().item():.6f}", flush=True)
dist.destroy_process_group()
