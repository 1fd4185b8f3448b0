"""The scale of the inputs is lost from one shard on: the loss leaves its level and stays away."""

import torch

import faultclock


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(200):
        if step == 140:
            faultclock.fired()
        inputs = torch.randn(64, 16)
        targets = inputs.sum(dim=1, keepdim=True) * (20.0 if step >= 140 else 1.0)
        loss = (model(inputs) - targets).abs().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
