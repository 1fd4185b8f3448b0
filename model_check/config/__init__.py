"""Config: frozen schema, presets, loading and validation. Imports no torch; reads only the files it is given."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model_check.config.load import from_jsonable, load_config, override_values, validate_config
    from model_check.config.presets import DEFAULT_PRESET, PRESETS, preset_path
    from model_check.config.resolve import resolve_shape, weights_file
    from model_check.config.schema import Config, to_jsonable
    from model_check.config.shapes import SHAPES, ModelShape, RopeScaling
    from model_check.config.validate import check_world

# Loaded on first use: this package's codes are also read where pydantic is not installed.
_HOMES = {
    "load": ("from_jsonable", "load_config", "override_values", "validate_config"),
    "presets": ("DEFAULT_PRESET", "PRESETS", "preset_path"),
    "resolve": ("resolve_shape", "weights_file"),
    "schema": ("Config", "to_jsonable"),
    "shapes": ("SHAPES", "ModelShape", "RopeScaling"),
    "validate": ("check_world",),
}

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


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"model_check.config.{module}"), name)
    raise AttributeError(f"module 'model_check.config' has no attribute '{name}'")
