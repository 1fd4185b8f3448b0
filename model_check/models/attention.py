"""Causal attention: which kernel runs, and how packed documents are kept apart.

    auto         FlashAttention 4 on Hopper and newer if it is installed, else cuDNN; FlashAttention on Ampere;
                 PyTorch's choice elsewhere; flex with documents
    sdpa         PyTorch's own choice among its kernels
    cudnn        cuDNN's fused kernel (half precision, CUDA)
    flash        PyTorch's FlashAttention
    flex         FlexAttention: skips the blocks that a document mask empties
    flash_attn   the flash-attn package, if it is installed
    flash_attn_4 the flash-attn-4 package, if it is installed (half precision, Hopper and newer)
    math         plain matrix products; slow, for comparison

Grouped-query attention never expands keys and values where the kernel can share them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from model_check.errors import ModelError

BACKENDS = ("auto", "sdpa", "cudnn", "flash", "flex", "flash_attn", "flash_attn_4", "math")
AttentionMask: TypeAlias = "Tensor | BlockMask | None"
MaskBuilder: TypeAlias = "Callable[[str, Tensor, Tensor | None], AttentionMask]"

_SDPA_KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
_WITH_DOCUMENTS = ("sdpa", "flex", "math")
_HALF = (torch.bfloat16, torch.float16)
_HOPPER, _AMPERE = (9, 0), (8, 0)
_SMALLEST_FLEX_HEAD = 16


def check_backend_name(name: str) -> None:
    """Raise for a name that is not a backend, or one whose package is absent on this machine."""
    if name not in BACKENDS:
        raise ModelError(
            f"model.attention_backend={name!r} is not a backend", remedy=f"choose one of {', '.join(BACKENDS)}"
        )
    if name == "flash_attn":
        _check_importable(name, "flash_attn", "pip install flash-attn --no-build-isolation")
    if name == "flash_attn_4":
        _check_importable(name, "flash_attn.cute.interface", 'pip install "flash-attn-4[cu13]"')


def _check_importable(name: str, module: str, command: str) -> None:
    problem = _import_problem(module)
    if problem is not None:
        raise ModelError(
            f"model.attention_backend={name!r} needs the {name.replace('_', '-')} package, which {problem}",
            remedy=f"{command}, or set model.attention_backend to auto",
        )


@functools.lru_cache(maxsize=2)
def _import_problem(module: str) -> str | None:
    """Why a kernel's package cannot be used; None if it can. A broken package must not end a run under `auto`."""
    package = importlib.util.find_spec("flash_attn")
    # Both packages share the folder flash_attn. If only version 4 is installed, it has no __init__.py.
    if package is None or (module == "flash_attn" and package.origin is None):
        return "is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a compiled package raises
        return f"cannot be imported ({type(error).__name__}: {error})"
    return None


@functools.lru_cache(maxsize=64)
def resolve_backend(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, documents: bool) -> str:
    """The backend that will run for `name` on this device and dtype; never `auto`."""
    check_backend_name(name)
    if name == "auto":
        return _best_backend(device, dtype, head_dim, documents)
    _check_backend_fits(name, device, dtype, head_dim, documents)
    return name


def _best_backend(device: torch.device, dtype: torch.dtype, head_dim: int, documents: bool) -> str:
    if device.type != "cuda":
        return "sdpa"
    if documents:
        return "flex" if head_dim >= _SMALLEST_FLEX_HEAD else "sdpa"
    if dtype not in _HALF or head_dim % 8:
        return "sdpa"
    capability = torch.cuda.get_device_capability(device)
    if _flash_attention_4_fits(device, dtype, head_dim) and _import_problem("flash_attn.cute.interface") is None:
        return "flash_attn_4"
    if capability >= _HOPPER and head_dim <= 128 and torch.backends.cudnn.is_available():
        return "cudnn"
    return "flash" if capability >= _AMPERE and head_dim <= 256 else "sdpa"


def _flash_attention_4_fits(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    if device.type != "cuda" or dtype not in _HALF:
        return False
    return torch.cuda.get_device_capability(device) >= _HOPPER and head_dim in (64, 96, 128)


def _check_backend_fits(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, documents: bool) -> None:
    key = f"model.attention_backend={name!r}"
    if name in ("cudnn", "flash_attn", "flash_attn_4") and device.type != "cuda":
        raise ModelError(f"{key} needs a CUDA device, and the model is on {device.type}", remedy="set it to auto")
    needs_half = name in ("cudnn", "flash_attn", "flash_attn_4") or (name == "flash" and device.type == "cuda")
    if needs_half and dtype not in _HALF:
        raise ModelError(
            f"{key} computes in bf16 or fp16, and the model runs in {str(dtype).removeprefix('torch.')}",
            remedy="set training.precision to bf16, or the backend to sdpa",
        )
    if name == "flash_attn_4" and not _flash_attention_4_fits(device, dtype, head_dim):
        raise ModelError(
            f"{key} needs a Hopper GPU or newer and heads 64, 96 or 128 wide, not {head_dim}", remedy="set it to auto"
        )
    largest_head = {"cudnn": 128, "flash": 256, "flash_attn": 256}.get(name)
    if device.type == "cuda" and largest_head is not None and head_dim > largest_head:
        raise ModelError(f"{key} takes heads up to {largest_head} wide, not {head_dim}", remedy="set it to sdpa")
    if device.type == "cuda" and name == "flex" and head_dim < _SMALLEST_FLEX_HEAD:
        raise ModelError(f"{key} takes heads from {_SMALLEST_FLEX_HEAD} wide, not {head_dim}", remedy="set it to sdpa")
    if documents and name not in _WITH_DOCUMENTS:
        raise ModelError(f"{key} cannot keep packed documents apart", remedy="set it to auto, flex or sdpa")


def build_mask(backend: str, tokens: Tensor, document_ids: Tensor | None) -> AttentionMask:
    """The mask of one pass over [batch, length, …], in the form `backend` takes; None is plain causal."""
    batch, length = tokens.shape[:2]
    device = tokens.device
    if backend == "flex":
        if document_ids is None:
            return _causal_block_mask(length, str(device))

        def same_document_and_not_later(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (document_ids[b, query] == document_ids[b, key])

        return create_block_mask(same_document_and_not_later, batch, None, length, length, device=str(device))
    if document_ids is None:
        return None
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    same_document = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    return (causal & same_document).unsqueeze(1)


def attend(query: Tensor, key: Tensor, value: Tensor, backend: str, mask: AttentionMask = None) -> Tensor:
    """Causal attention over [batch, length, heads, head_dim]; `mask` is what `build_mask` made."""
    if backend == "flash_attn_4":
        from model_check.models.flash_attention_4 import flash_attention_4

        return flash_attention_4(query, key, value)
    if backend == "flash_attn":
        from flash_attn import flash_attn_func

        return flash_attn_func(query, key, value, causal=True)
    query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if backend == "flex":
        output = _flex(query, key, value, mask, grouped)
    else:
        assert not isinstance(mask, BlockMask), f"a block mask reached the {backend} backend"
        if grouped and _fused_kernels_need_equal_heads(query, backend, mask):
            groups = query.shape[1] // key.shape[1]
            key, value, grouped = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), False
        with _only_kernel(backend):
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
            )
    return output.transpose(1, 2)


def _fused_kernels_need_equal_heads(query: Tensor, backend: str, mask: Tensor | None) -> bool:
    """The memory-efficient kernel is CUDA's only fused one for fp32 or a mask, and it does not share K and V."""
    return backend == "sdpa" and query.is_cuda and (mask is not None or query.dtype == torch.float32)


def _only_kernel(backend: str) -> AbstractContextManager[Any]:
    return sdpa_kernel(_SDPA_KERNELS[backend]) if backend in _SDPA_KERNELS else nullcontext()


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, grouped: bool) -> Tensor:
    if query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad:
        raise ModelError(
            "model.attention_backend='flex' has no backward pass on the CPU", remedy="set it to auto or sdpa"
        )
    assert isinstance(mask, BlockMask), f"flex takes a block mask, not {type(mask).__name__}"
    # Uncompiled, FlexAttention writes out every score, so on a GPU it is compiled even where the model is not.
    kernel = _compiled_flex() if query.is_cuda and not torch.compiler.is_compiling() else flex_attention
    output = kernel(query, key, value, block_mask=mask, enable_gqa=grouped)
    assert isinstance(output, Tensor), "FlexAttention returned more than its output"
    return output


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=8)
def _causal_block_mask(length: int, device: str) -> BlockMask:
    return create_block_mask(lambda _b, _h, query, key: query >= key, None, None, length, length, device=device)
