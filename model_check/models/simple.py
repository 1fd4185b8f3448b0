"""The smallest model that trains: for minimal reproductions, where a LLaMA would be in the way."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from model_check.models.loss import IGNORED


class SimpleModel(nn.Module):
    """Predicts each target from its token alone, through `num_layers` residual linear layers.

    Called as a Llama is: tokens [batch, length] give logits, tokens and targets give the mean loss.
    """

    def __init__(self, hidden_size: int, num_layers: int, vocab_size: int = 4096) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
        self.output = nn.Linear(hidden_size, vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + F.gelu(layer(hidden))
        logits: Tensor = self.output(hidden)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
