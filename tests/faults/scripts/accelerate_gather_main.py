"""accelerate: gather() inside `if accelerator.is_main_process`."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import faultclock


def report(accelerator, loss):
    faultclock.fired()
    losses = accelerator.gather(loss.detach().reshape(1))  # FAULT
    accelerator.print("mean loss", losses.mean().item())


def main():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(640, 8)), batch_size=4)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    for step, (x,) in enumerate(loader):
        loss = model(x).pow(2).mean()
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
        if accelerator.is_main_process and step == 20:
            report(accelerator, loss)
    accelerator.end_training()


if __name__ == "__main__":
    main()
