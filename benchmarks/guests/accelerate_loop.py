"""Hugging Face accelerate."""

import torch
from accelerate import Accelerator
from guestbook import STEPS, Guestbook
from model import BATCH, WIDTH, Net
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
net = Net()
data = DataLoader(TensorDataset(torch.randn(2 * BATCH * STEPS, WIDTH)), BATCH)
model, optimizer, data = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3), data)
book = Guestbook()
for (rows,) in data:
    loss = model(rows).square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    book.step(loss.item())
book.close(net.state_dict())
accelerator.save(accelerator.get_state_dict(model), "model.pt")
accelerator.end_training()
