"""Models: LLaMA as a plain nn.Module, its loss, and Hugging Face in and out. May import config."""

from model_check.models.attention import BACKENDS
from model_check.models.compile import apply_compile
from model_check.models.hf_config import config_from_shape, shape_from_config, shape_from_pretrained
from model_check.models.initialize import build_empty_model, build_meta_model, build_model, initialize
from model_check.models.llama import Attention, Block, FeedForward, Llama, RMSNorm
from model_check.models.loss import IGNORED, fused_linear_cross_entropy, plain_linear_cross_entropy
from model_check.models.simple import SimpleModel
from model_check.models.weights import check_pretrained, hugging_face_name, load_pretrained, own_name, save_pretrained

__all__ = [
    "BACKENDS",
    "IGNORED",
    "Attention",
    "Block",
    "FeedForward",
    "Llama",
    "RMSNorm",
    "SimpleModel",
    "apply_compile",
    "build_empty_model",
    "build_meta_model",
    "build_model",
    "check_pretrained",
    "config_from_shape",
    "fused_linear_cross_entropy",
    "hugging_face_name",
    "initialize",
    "load_pretrained",
    "own_name",
    "plain_linear_cross_entropy",
    "save_pretrained",
    "shape_from_config",
    "shape_from_pretrained",
]
