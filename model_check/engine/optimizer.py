"""The optimizer of a model: AdamW, fused, with weight decay on matrices only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from model_check.config.eight_bit import torchao_missing
from model_check.config.sections import TrainingSection
from model_check.engine.split_adamw import SplitAdamW


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and embeddings decay; norms, biases and other vectors do not.

    Parameters on different meshes go apart as well: one fused call takes the shards of one mesh.
    """
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((parameter.ndim >= 2, getattr(parameter, "device_mesh", None)), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: not item[0][0])
    return [{"params": group, "weight_decay": weight_decay if decays else 0.0} for (decays, _), group in ordered]


def build_optimizer(model: nn.Module, training: TrainingSection) -> torch.optim.Optimizer:
    """Every kind takes `grad_scale` and `found_inf`, so clipping and skipping need no host synchronisation."""
    groups = decay_groups(model, training.weight_decay)
    options: dict[str, Any] = {"lr": training.learning_rate, "betas": training.betas, "eps": training.eps}
    if training.optimizer_states == "8bit":
        return _eight_bit(groups, options)
    if training.optimizer_states == "bf16":
        return SplitAdamW(groups, **options, state_dtype=torch.bfloat16)
    if any(p.dtype == torch.bfloat16 for p in model.parameters()):
        return SplitAdamW(groups, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def _eight_bit(groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    """torchao's AdamW, whose moments take a byte each. It knows neither `grad_scale` nor `found_inf`."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise torchao_missing(error) from error

    class ScaledAdamW8bit(AdamW8bit):
        """Scales gradients and skips a step by itself, at the price of one wait for the device."""

        grad_scale: torch.Tensor | None = None
        found_inf: torch.Tensor | None = None

        def step(self, closure: Any = None) -> Any:
            if self.found_inf is not None and self.found_inf.item():
                return None
            factor = 1.0 if self.grad_scale is None else 1.0 / self.grad_scale.item()
            for group in self.param_groups:
                gradients = [p.grad for p in group["params"] if p.grad is not None]
                if gradients:
                    torch._foreach_mul_(gradients, factor)
                # A plain number would be compiled into its kernel, one for each step; torchao refuses it.
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
            return super().step(closure)

    return ScaledAdamW8bit(groups, **options)
