"""The optimizer of a model: AdamW, fused, with weight decay on matrices only."""

from __future__ import annotations

import torch
from torch import nn

from model_check.config.sections import TrainingSection
from model_check.engine.split_adamw import SplitAdamW


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices and embeddings decay; norms, biases and other vectors do not."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, training: TrainingSection) -> torch.optim.Optimizer:
    """Both kinds take `grad_scale` and `found_inf`, so clipping and skipping need no host synchronisation."""
    groups = decay_groups(model, training.weight_decay)
    options = {"lr": training.learning_rate, "betas": training.betas, "eps": training.eps}
    if any(p.dtype == torch.bfloat16 for p in model.parameters()):
        return SplitAdamW(groups, **options)  # type: ignore[arg-type]
    return torch.optim.AdamW(groups, fused=True, **options)  # type: ignore[arg-type]
