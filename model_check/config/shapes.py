"""The shapes of the public LLaMA models, built in so that training from scratch needs no hub."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

ROPE_THETA = 500_000.0
NORM_EPS = 1e-5
MAX_POSITION = 8192


@dataclass(frozen=True)
class RopeScaling:
    """LLaMA 3.1's stretch of the low rotary frequencies, which lengthens the context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides the size of a LLaMA, and nothing that decides its weights."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = ROPE_THETA
    rope_scaling: RopeScaling | None = None
    norm_eps: float = NORM_EPS
    tie_embeddings: bool = False
    max_position: int = MAX_POSITION

    def parameters_per_layer(self) -> int:
        """Weights of one block: four attention matrices, three of the MLP, two norms."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return attention + mlp + 2 * self.hidden_size

    def parameters(self) -> int:
        """All weights; a tied matrix counts once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * self.parameters_per_layer() + embeddings + self.hidden_size

    def parameters_without_embedding(self) -> int:
        """Weights that every token is multiplied with. A tied matrix stays: it is the output head too."""
        lookup_only = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size
        return self.parameters() - lookup_only


def _scaling(factor: float) -> RopeScaling:
    return RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)


_LLAMA_2_7B = ModelShape(32, 4096, 32, 32, 128, 11008, 32000, rope_theta=10_000.0, max_position=4096)
_LLAMA_3_8B = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)
_LLAMA_3_70B = ModelShape(80, 8192, 64, 8, 128, 28672, 128256)
_LLAMA_31_8B = replace(_LLAMA_3_8B, rope_scaling=_scaling(8.0), max_position=131072)
_LLAMA_31_70B = replace(_LLAMA_3_70B, rope_scaling=_scaling(8.0), max_position=131072)
_LLAMA_32_1B = ModelShape(
    16, 2048, 32, 8, 64, 8192, 128256, rope_scaling=_scaling(32.0), tie_embeddings=True, max_position=131072
)

SHAPES: dict[str, ModelShape] = {
    "llama-2-7b": _LLAMA_2_7B,
    "llama-2-13b": replace(
        _LLAMA_2_7B, num_layers=40, hidden_size=5120, num_heads=40, num_kv_heads=40, intermediate_size=13824
    ),
    "llama-2-70b": replace(
        _LLAMA_2_7B, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, intermediate_size=28672
    ),
    "llama-3-8b": _LLAMA_3_8B,
    "llama-3-70b": _LLAMA_3_70B,
    "llama-3.1-8b": _LLAMA_31_8B,
    "llama-3.1-70b": _LLAMA_31_70B,
    "llama-3.1-405b": replace(_LLAMA_31_70B, num_layers=126, hidden_size=16384, num_heads=128, intermediate_size=53248),
    "llama-3.2-1b": _LLAMA_32_1B,
    "llama-3.2-3b": replace(_LLAMA_32_1B, num_layers=28, hidden_size=3072, num_heads=24, head_dim=128),
    "llama-3.3-70b": _LLAMA_31_70B,
    "14b": ModelShape(48, 5120, 40, 8, 128, 13824, 152064, rope_theta=1_000_000.0, max_position=32768),
    "32b": ModelShape(64, 5120, 40, 8, 128, 27648, 152064, rope_theta=1_000_000.0, max_position=32768),
}


def short_name(model_path: str) -> str:
    """`meta-llama/Meta-Llama-3.1-8B-Instruct` -> `llama-3.1-8b`: variants of one model share its shape."""
    name = model_path.lower().removeprefix("meta-llama/").removeprefix("meta-")
    name = re.sub(r"^llama(?=\d)", "llama-", name)
    return re.sub(r"(-(instruct|chat|hf|base|fp8))+$", "", name)


def built_in_shape(model_path: str) -> ModelShape | None:
    return SHAPES.get(short_name(model_path))


def nearest_shapes(model_path: str) -> list[str]:
    """Up to three built-in names that look like this one; all of them where none does."""
    name = short_name(model_path).rpartition("/")[2]
    return difflib.get_close_matches(name, SHAPES, n=3, cutoff=0.5) or list(SHAPES)
