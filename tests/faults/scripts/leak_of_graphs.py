"""The validation loss of every step is kept, and with it the graph behind it, which no backward ever frees."""

import time

import torch

import faultclock

faultclock.fired()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for step in range(1200):
    loss = model(torch.randn(64, 64)).pow(2).mean()  # FAULT-ALSO
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(model(torch.randn(512, 64)).pow(2).mean())  # FAULT
    time.sleep(0.03)
