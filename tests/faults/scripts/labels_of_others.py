"""Inputs and labels are shuffled apart: rate and gradients are as they should be, and there is nothing to learn."""

import torch

import faultclock

CLASSES = 10


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, CLASSES))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    middle = torch.randn(CLASSES, 16)
    for step in range(320):
        if step == 200:
            faultclock.fired()
        labels = torch.randint(0, CLASSES, (128,))
        inputs = middle[labels] + 0.1 * torch.randn(128, 16)
        labels = labels[torch.randperm(128)]
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
