"""Nothing distributed at all: each copy trains on its own."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(200):
    x = torch.randn(16, 8)
    loss = (model(x) - x.mean(1, keepdim=True)).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
print("RESULT", repr(loss.item()))
