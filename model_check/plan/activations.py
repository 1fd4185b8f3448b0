"""What a LLaMA keeps between its forward and its backward pass, in bytes: a block of each token, and the loss.

Derived from the operations of the block, not fitted. A linear layer needs its input to form its weight's gradient; the
attention kernel needs queries, keys, values and its own output; the SwiGLU gate needs both of its inputs. Compiled, a
value that only elementwise work reads is computed again; one that a matrix product reads is kept. Uncompiled, every
operation keeps what its own derivative reads, float32 copies inside the norms included. The output head and the
cross-entropy are fused in chunks of rows, or have all logits at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_check.config import ModelShape
from model_check.plan.workload import Workload

# The fused loss takes as many rows at once as their logits fill (models.loss; a test compares the two numbers).
CHUNK_BYTES = 1 << 30
_FP32 = 4


@dataclass(frozen=True)
class BlockBytes:
    """Bytes a token, of one block on one rank.

    kept      between its forward and its backward pass
    whole     while its backward pass runs, everything it needs
    working   gradients of activations on the way through it
    """

    kept: float
    whole: float
    working: float


@dataclass(frozen=True)
class _Widths:
    """Numbers a token; heads and the MLP's inside are cut over `tensor` ranks, the residual stream is not."""

    hidden: int
    query: float
    key: float
    inside: float
    heads: float

    @classmethod
    def of(cls, shape: ModelShape, tensor: int) -> _Widths:
        return cls(
            hidden=shape.hidden_size,
            query=shape.num_heads * shape.head_dim / tensor,
            key=shape.num_kv_heads * shape.head_dim / tensor,
            inside=shape.intermediate_size / tensor,
            heads=shape.num_heads / tensor,
        )


def block_bytes(shape: ModelShape, load: Workload, *, tensor: int, context_ranks: int, autocast: bool) -> BlockBytes:
    """What a block of this shape keeps of each token under this workload.

    autocast   parameters are float32 and products half: the residual stream is then float32 too
    """
    widths = _Widths.of(shape, tensor)
    stream = _FP32 if autocast else load.width
    attention = _attention(widths, load, context_ranks)
    tables = load.width * shape.head_dim
    whole = tables + (_compiled if load.compiled else _uncompiled)(widths, load, stream, attention)
    if load.recomputation == "full":
        kept = float(stream * widths.hidden)
    elif load.recomputation == "selective":
        kept = stream * widths.hidden + load.width * (_kept_products(widths) + widths.query) + _FP32 * widths.heads
    else:
        kept = whole
    working = stream * widths.hidden + 2 * load.width * widths.inside
    return BlockBytes(kept, max(whole, kept), working)


def weight_copies_kept(shape: ModelShape, load: Workload, *, tensor: int, autocast: bool) -> float:
    """Bytes of half copies of a block's weights that autocast makes and the backward pass reads."""
    if not autocast or load.recomputation != "none":
        return 0.0
    return load.width * shape.parameters_per_layer() / tensor


def _attention(widths: _Widths, load: Workload, context_ranks: int) -> float:
    """Queries, keys, values, output and the logarithm of each softmax's sum."""
    # The only fused kernel for float32 takes as many key heads as query heads.
    key = widths.key if load.half else widths.query
    return load.width * (2 * widths.query + 2 * key * context_ranks) + _FP32 * widths.heads


def _compiled(widths: _Widths, load: Workload, stream: int, attention: float) -> float:
    # The residual stream as it comes in, and what attention adds to it: the second norm starts from their sum.
    residuals = (stream + load.width) * widths.hidden
    norm_scales = 2 * _FP32
    if load.precision == "fp8":
        # A product's input is cast to a byte a number on the way in: the cast is elementwise work, so it is repeated.
        return residuals + norm_scales + attention + load.width * 2 * widths.inside
    inputs = load.width * (2 * widths.hidden + widths.inside)
    return residuals + norm_scales + attention + inputs + load.width * 2 * widths.inside


def _uncompiled(widths: _Widths, load: Workload, stream: int, attention: float) -> float:
    # A norm keeps its input in float32 and its result before the weight.
    norms = 2 * (_FP32 + stream) * widths.hidden
    # Under autocast each of five linear layers casts its input for itself; otherwise they share the norm's result.
    inputs = load.width * widths.hidden * (5 if stream != load.width else 2)
    norm_scales = 2 * _FP32
    # The gate, its sigmoid-weighted form, the other factor, their product.
    return norms + norm_scales + inputs + attention + load.width * 4 * widths.inside


def _kept_products(widths: _Widths) -> float:
    """Widths of the products that selective recomputation keeps: those that keep the width, and of those that widen
    every second one, beginning with the first."""
    hidden, kept, widening = widths.hidden, 0.0, 0
    products = (
        (hidden, widths.query),
        (hidden, widths.key),
        (hidden, widths.key),
        (widths.query, hidden),
        (hidden, widths.inside),
        (hidden, widths.inside),
        (widths.inside, hidden),
    )
    for before, after in products:
        if after == before:
            kept += after
        elif after > before:
            widening += 1
            kept += after if widening % 2 else 0.0
    return kept


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
