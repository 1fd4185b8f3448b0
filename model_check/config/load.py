"""Puts a configuration together: defaults < preset < files in order < values < --set, each value with its origin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_check.config import codes
from model_check.config.faults import shown
from model_check.config.presets import DEFAULT_PRESET, PRESETS, preset_path
from model_check.config.resolve import SIZES, weights_file
from model_check.config.schema import Config, build_config, flat_values, leaf_fields
from model_check.config.sources import parse_yaml, read_config_file
from model_check.config.validate import rule_problems
from model_check.errors import ConfigError, Problem


@dataclass
class _Layers:
    """Values by dotted key as the layers are laid one over the other, and what was wrong on the way."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add_value(self, key: str, value: Any, origin: str) -> None:
        """A plain value, or a mapping for a section."""
        if key not in _SECTIONS:
            self.values[key], self.origins[key] = value, origin
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                self.add_value(f"{key}.{name}", inner, origin)
        elif value is not None:
            message = f"{key}={shown(value)} (from {origin}) must be a section with keys"
            self.refuse(
                codes.NOT_A_SECTION, key, message, f"write keys below {key}, as docs/configuration.md lists them"
            )

    def add_tree(self, tree: Any, origin: str) -> None:
        """A whole file; an empty one says nothing."""
        if isinstance(tree, Mapping):
            for key, value in tree.items():
                self.add_value(str(key), value, origin)
        elif tree is not None:
            message = f"{origin} holds {shown(tree)} where sections are expected"
            self.refuse(
                codes.NOT_A_SECTION, "", message, 'begin with a section, such as {"training": {"max_steps": 10}}'
            )

    def add_file(self, path: Path, origin: str) -> None:
        with self._keeping_problems():
            self.add_tree(read_config_file(path), origin)

    def add_preset(self, name: str) -> None:
        with self._keeping_problems():
            self.add_file(preset_path(name), f"preset {name}")

    def add_override(self, assignment: str) -> None:
        """One `section.key=value` of --set; the value is a YAML scalar (or list)."""
        key, equals, text = assignment.partition("=")
        key = key.strip()
        try:
            value = parse_yaml(text)
        except ValueError as error:
            message = f"--set {assignment} has a value that cannot be read: {error}"
            self.refuse(codes.BAD_ASSIGNMENT, key, message, "quote it")
            return
        if equals and key:
            self.add_value(key, value, "--set")
        else:
            message = f"--set {assignment} is not of the form section.key=value"
            self.refuse(codes.BAD_ASSIGNMENT, key, message, "write it like --set training.max_steps=10")

    def refuse(self, code: str, key: str, message: str, remedy: str) -> None:
        self.problems.append(Problem(code, key, message, remedy))

    @contextmanager
    def _keeping_problems(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self.problems += error.problems

    def add_config(self, config: Config) -> None:
        self.values |= flat_values(config)
        self.origins |= config.origins

    def leave_shape_to_named_model(self) -> None:
        """Drops a preset's sizes if the user names a model, which brings its whole shape.

        A plain file of weights gives no sizes, so the preset's sizes stay.
        """
        path = self.values.get("model.model_path")
        if not isinstance(path, str) or self._is_from_preset("model.model_path") or weights_file(path) is not None:
            return
        for key in (f"model.{name}" for name in SIZES):
            if self._is_from_preset(key):
                del self.values[key], self.origins[key]

    def _is_from_preset(self, key: str) -> bool:
        return self.origins.get(key) in _PRESET_ORIGINS


# Every part of a dotted key before one of its dots.
_SECTIONS = {key[:at] for key in leaf_fields(Config) for at, sign in enumerate(key) if sign == "."}
_PRESET_ORIGINS = {f"preset {name}" for name in PRESETS}


def load_config(
    *files: str | Path,
    preset: str | None = None,
    overrides: Iterable[str] = (),
    values: Mapping[str, tuple[Any, str]] | None = None,
    base: Config | None = None,
) -> Config:
    """The configuration these sources make; ConfigError with all their problems at once.

    `values` maps dotted keys to (value, origin), as flags and environment variables give them. `base` stands in for
    the defaults and the default preset.
    """
    layers = _Layers()
    if base is not None:
        layers.add_config(base)
    if preset is not None or base is None:
        layers.add_preset(DEFAULT_PRESET if preset is None else preset)
    for file in files:
        layers.add_file(Path(file), str(file))
    for key, (value, origin) in (values or {}).items():
        layers.add_value(key, value, origin)
    for assignment in overrides:
        layers.add_override(assignment)
    return _checked(layers, source=str(files[0]) if len(files) == 1 else "the configuration")


def override_values(overrides: Iterable[str]) -> dict[str, Any]:
    """The values by dotted key that these --set give; what cannot be read is left to `load_config` to refuse."""
    layers = _Layers()
    for assignment in overrides:
        layers.add_override(assignment)
    return layers.values


def _checked(layers: _Layers, source: str) -> Config:
    if any(problem.code == codes.UNKNOWN_PRESET for problem in layers.problems):
        # Without its preset most of a configuration is missing; what else seems wrong follows from that.
        raise ConfigError(layers.problems, source)
    layers.leave_shape_to_named_model()
    return build_config(layers.values, layers.origins, source, layers.problems)


def validate_config(config: Config | Mapping[str, Any] | str | Path) -> tuple[bool, list[str]]:
    """Whether a configuration (an object, a nested dict over the default preset, or a file) is fine, and if not why."""
    if isinstance(config, Config):
        problems = rule_problems(config)
        return not problems, [str(problem) for problem in problems]
    try:
        if isinstance(config, (str, Path)):
            load_config(config)
        else:
            layers = _Layers()
            layers.add_preset(DEFAULT_PRESET)
            layers.add_tree(config, "the given values")
            _checked(layers, source="the given values")
    except ConfigError as error:
        return False, [str(problem) for problem in error.problems]
    return True, []


def from_jsonable(record: Any) -> Config:
    """The config that `to_jsonable` wrote, with its origins; ConfigError where the record is not one."""
    values, origins = (record.get("values"), record.get("origins")) if isinstance(record, Mapping) else (None, None)
    if not isinstance(values, Mapping) or not isinstance(origins, Mapping):
        problem = Problem(
            codes.NOT_A_SECTION,
            "",
            f"{shown(record)} is not a recorded configuration",
            "pass what config.json of a run directory holds",
        )
        raise ConfigError([problem], "config.json")
    layers = _Layers()
    layers.add_tree(values, "config.json")
    return build_config(layers.values, layers.origins | dict(origins), source="config.json")
