"""The presets: named starting points, one JSON file each."""

from __future__ import annotations

import difflib
from pathlib import Path

from model_check.config import codes
from model_check.errors import ConfigError, Problem

PRESETS = ("debug", "production", "full", "stable", "14b", "32b")
DEFAULT_PRESET = "production"


def preset_path(name: str) -> Path:
    """The file of a preset; ConfigError with the nearest name where there is none."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.5)
        raise ConfigError(
            [
                Problem(
                    codes.UNKNOWN_PRESET,
                    "preset",
                    f"there is no preset {name or repr(name)}; the presets are {', '.join(PRESETS)}",
                    f"did you mean {close[0]}?" if close else f"use {DEFAULT_PRESET}",
                )
            ],
            "--preset",
        )
    return Path(__file__).parent / f"{name}.json"
