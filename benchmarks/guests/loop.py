"""The training loop that most guests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from guestbook import STEPS, Guestbook
from model import batch


def train(
    model: Any, next_batch: Callable[[], torch.Tensor] = batch, *, after: Callable[[int], None] | None = None
) -> Guestbook:
    """Trains for the guest's number of steps; `after` is called with the number of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    book = Guestbook()
    for step in range(STEPS):
        loss = model(next_batch()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        book.step(loss.item())
        if after is not None:
            after(step)
    return book
