"""How much arithmetic a token costs, and how much of a chip's peak a run reaches (MFU)."""

from __future__ import annotations

from model_check.config.shapes import ModelShape


def count_flops_per_token(shape: ModelShape, context: int) -> float:
    """Floating-point operations of one token's forward and backward pass at this context length.

    6 per weight (2 forward, 4 backward), the input embedding aside, for it is a lookup and no product; and
    6 · layers · width · context for causal attention, of which half the scores exist. Recomputation counts for
    nothing: MFU measures useful work.
    """
    attention_width = shape.num_heads * shape.head_dim
    return 6.0 * shape.parameters_without_embedding() + 6.0 * shape.num_layers * attention_width * context


def model_flops_utilization(flops_per_token: float, tokens_per_s: float, peak: float | None) -> float | None:
    """The share of the peak that useful work reaches on one device, 0 to 1; None where the peak is unknown.

    The peak is that of the run's precision, and of bf16 for fp8, where only some products are fp8: the two compare so.
    """
    return None if peak is None else flops_per_token * tokens_per_s / peak
