"""Models: LLaMA as a plain nn.Module, its loss, and Hugging Face in and out. May import config."""

from model_check.models.compile import apply_compile
from model_check.models.hf_config import config_from_shape
from model_check.models.initialize import build_meta_model, build_model, initialize
from model_check.models.llama import Llama
from model_check.models.loss import plain_linear_cross_entropy
from model_check.models.simple import SimpleModel
from model_check.models.weights import check_pretrained, hugging_face_name, load_pretrained, own_name

__all__ = [
    "Llama",
    "SimpleModel",
    "apply_compile",
    "build_meta_model",
    "build_model",
    "check_pretrained",
    "config_from_shape",
    "hugging_face_name",
    "initialize",
    "load_pretrained",
    "own_name",
    "plain_linear_cross_entropy",
]
