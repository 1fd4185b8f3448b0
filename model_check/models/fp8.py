"""fp8 matrix products, applied from outside: same parameters, same names, faster GEMMs.

Each operand is scaled by its own largest magnitude (tensor-wise) and cast: weights and activations to e4m3, gradients
to e5m2, which trades a bit of mantissa for range. Products inside the blocks use the tensor core's fast accumulator,
which is 5 % faster than accumulation in fp32. The output projection has its own kernels (loss_fp8). Embeddings, norms
and attention stay in bf16. The casts inside the blocks fuse into the neighbouring kernels only under torch.compile;
without it fp8 is slower than bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from model_check.errors import ModelError
from model_check.models.llama import Llama
from model_check.models.loss import fused_linear_cross_entropy

_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST_CAPABILITY = (8, 9)  # Ada and Hopper; older tensor cores have no fp8
_MULTIPLE = 16  # what the fp8 GEMMs need of every dimension


def _scale_of(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The fp32 factor that maps the largest magnitude to the largest number of `dtype`."""
    return value.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max


def _cast(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in fp8 and the fp32 number to multiply it with."""
    scale = _scale_of(value, dtype)
    return _scaled(value, scale, dtype), scale


def _scaled(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (value.float() / scale).to(dtype)


def _product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right.T for two row-major fp8 matrices, the layout that the tensor cores take."""
    return torch._scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=dtype, use_fast_accum=True)


class _Fp8Product(torch.autograd.Function):
    """x @ weight.T; keeps the activation for the backward in one byte a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows, rows_scale = _cast(x.flatten(0, -2), _FORWARD)
        matrix, matrix_scale = _cast(weight, _FORWARD)
        # Backward casts the weight again, from the bf16 copy that exists anyway: keeping its transpose would cost a
        # byte per element for as long as the activations live. Its largest magnitude is not searched for again.
        ctx.save_for_backward(rows, rows_scale, weight, matrix_scale)
        ctx.shape = x.shape
        return _product(rows, rows_scale, matrix, matrix_scale, x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, rows_scale, weight, matrix_scale = ctx.saved_tensors
        gradient, gradient_scale = _cast(grad.flatten(0, -2), _BACKWARD)
        matrix = _scaled(weight, matrix_scale, _FORWARD)
        for_x = _product(gradient, gradient_scale, matrix.t().contiguous(), matrix_scale, grad.dtype)
        for_weight = _product(
            gradient.t().contiguous(), gradient_scale, rows.t().contiguous(), rows_scale, weight.dtype
        )
        return for_x.view(ctx.shape), for_weight


class Fp8Linear(nn.Linear):
    """An nn.Linear without bias whose products run in fp8."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Fp8Product.apply(x, self.weight)
        return result


def apply_fp8(model: Llama, device: torch.device | None = None) -> Llama:
    """Switches every linear layer of every block and the fused loss to fp8, in place; call it before compiling.

    `device` is where a model that is still on the meta device will run.
    """
    device = device or next(model.parameters()).device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise ModelError(f"training.precision=fp8 does not run on {name}", remedy="use bf16")
    for name, module in model.layers.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
            raise ModelError(
                f"layers.{name} is {module.out_features} x {module.in_features}; fp8 needs multiples of {_MULTIPLE}",
                remedy="use bf16, or sizes that are multiples of 16",
            )
        module.__class__ = Fp8Linear
    if model.linear_cross_entropy is fused_linear_cross_entropy and model.shape.vocab_size % _MULTIPLE == 0:
        from model_check.models.loss_fp8 import fp8_linear_cross_entropy

        model.linear_cross_entropy = fp8_linear_cross_entropy
    return model
