"""Builds a model without ever holding it twice, with weights that depend on the seed and their names alone.

Each parameter draws from a generator of its own, seeded by (seed, name): whichever rank holds it, in whatever order
parameters are made, it gets the same values on the same kind of device.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from model_check.config.shapes import ModelShape
from model_check.models.distribute import fill
from model_check.models.llama import Llama, RMSNorm

DEFAULT_INIT_STD = 0.02
_ADDS_TO_RESIDUAL = ("attention.wo.weight", "feed_forward.w2.weight")


def build_model(
    shape: ModelShape,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    init_std: float = DEFAULT_INIT_STD,
    attention_backend: str = "auto",
) -> Llama:
    """A model of this shape on this device, initialised from the seed."""
    model = build_meta_model(shape, dtype, attention_backend).to_empty(device=device)
    initialize(model, seed=seed, init_std=init_std)
    return model


def build_meta_model(shape: ModelShape, dtype: torch.dtype = torch.float32, attention_backend: str = "auto") -> Llama:
    """Names and shapes only: cut it up first, and no rank ever holds more than its own part."""
    with torch.device("meta"):
        return Llama(shape, attention_backend).to(dtype)


@torch.no_grad()
def initialize(
    model: Llama, *, seed: int, init_std: float = DEFAULT_INIT_STD, draw_on: torch.device | None = None
) -> None:
    """Norms to one; matrices normal with `init_std`, narrower by sqrt(2 * layers) where they add to the residual.

    draw_on: the device whose generator is used; None: where each parameter lives. A GPU draws other numbers than a
    host, so parameters that live on the host only (offloaded ones) are drawn, one at a time, where they are used.
    """
    norm_weights = {id(module.weight) for module in model.modules() if isinstance(module, RMSNorm)}
    for name, parameter in model.named_parameters():
        if id(parameter) in norm_weights:
            fill(parameter, torch.ones(parameter.shape, dtype=parameter.dtype, device=parameter.device))
            continue
        narrow = name.endswith(_ADDS_TO_RESIDUAL)
        std = init_std / math.sqrt(2 * model.shape.num_layers) if narrow else init_std
        fill(parameter, _normal(parameter, std, _seed_of(seed, name), draw_on or parameter.device))


def _normal(like: Tensor, std: float, seed: int, device: torch.device) -> Tensor:
    """Drawn in float32, so that a bf16 model is the rounding of the float32 one."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.empty(like.shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
