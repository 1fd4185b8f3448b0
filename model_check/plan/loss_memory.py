"""What the output head and the cross-entropy hold, fused in chunks or with all logits at once."""

from __future__ import annotations

from dataclasses import dataclass

from model_check.config import ModelShape
from model_check.plan.workload import Workload

# The fused loss takes as many rows at once as their logits fill (models.loss; a test compares the two numbers).
CHUNK_BYTES = 1 << 30
_FP32 = 4


@dataclass(frozen=True)
class LossBytes:
    """Bytes on one rank, at the worst moment of the loss.

    finished   of `weight_gradient`, what exists already at that moment: all of it in the fused loss
    """

    logits: float
    finished: float
    weight_gradient: float
    hidden_gradient: float


def chunk_rows(rows: int, vocabulary: int, width: int) -> int:
    """Equal chunks whose logits fit the budget."""
    most = max(1, CHUNK_BYTES // (vocabulary * width))
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


def loss_bytes(shape: ModelShape, load: Workload, tokens: float, *, tensor: int, autocast: bool) -> LossBytes:
    """The loss of `tokens` tokens, the vocabulary cut over `tensor` ranks."""
    vocabulary = shape.vocab_size // tensor
    weight = vocabulary * shape.hidden_size
    hidden_gradient = tokens * shape.hidden_size * load.width
    # Products are summed over chunks in bf16 only where the parameter itself is bf16.
    gradient = weight * (_FP32 if autocast else load.width)
    if not load.fused_loss and tensor == 1:
        # In the backward pass: the float32 log-softmax, and a gradient for it and for the logits.
        return LossBytes(3 * _FP32 * tokens * vocabulary, 0.0, gradient, hidden_gradient)
    rows = chunk_rows(round(tokens), vocabulary, load.width)
    chunk = float(rows * vocabulary * load.width)
    chunks = -(-round(tokens) // rows)
    if tensor > 1:
        # Scores and their gradient in float32 beside the half ones; the sum over chunks and the newest summand.
        at_once = chunk * (1 + 2 * _FP32 / load.width) + weight * 2 * _FP32
        return LossBytes(at_once, 0.0, gradient, hidden_gradient)
    if load.precision == "fp8":
        # Hidden states and weight in fp8, in both layouts; the whole transposed gradient of the logits; the logits of
        # two chunks and the logit gradient of one. The weight's gradient is made after the last chunk.
        both_ways = 2 * shape.hidden_size * (tokens + vocabulary)
        at_once = both_ways + tokens * vocabulary + rows * vocabulary * (load.width * min(2, chunks) + 1)
        return LossBytes(at_once, 0.0, gradient, hidden_gradient)
    # A chunk's logits stay until those of the next have taken their name.
    two_chunks = chunk * min(2, chunks)
    if not autocast:
        return LossBytes(two_chunks, gradient, gradient, hidden_gradient)
    # The weight in the format of the product; later, beside one chunk, a float32 product to be added to the sum.
    summand = weight * _FP32 if chunks > 1 else 0.0
    at_once = weight * load.width + max(two_chunks, chunk + summand)
    return LossBytes(at_once, gradient, gradient, hidden_gradient)
