"""Config: frozen schema, presets, loading and validation. Imports no torch; reads only the files it is given."""

from model_check.config.load import from_jsonable, load_config, override_values, validate_config
from model_check.config.presets import DEFAULT_PRESET, PRESETS, preset_path
from model_check.config.resolve import resolve_shape, weights_file
from model_check.config.schema import Config, to_jsonable
from model_check.config.shapes import SHAPES, ModelShape, RopeScaling
from model_check.config.validate import check_world

__all__ = [
    "DEFAULT_PRESET",
    "PRESETS",
    "SHAPES",
    "Config",
    "ModelShape",
    "RopeScaling",
    "check_world",
    "from_jsonable",
    "load_config",
    "override_values",
    "preset_path",
    "resolve_shape",
    "to_jsonable",
    "validate_config",
    "weights_file",
]
