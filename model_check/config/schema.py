"""The configuration as one frozen object that knows where each of its values came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from pydantic import BaseModel, PrivateAttr, ValidationError

from model_check.config.faults import schema_problems, unknown_key_problems
from model_check.config.sections import (
    CheckpointSection,
    DataSection,
    DebugSection,
    FsdpSection,
    LaunchSection,
    LoggingSection,
    ModelSection,
    ParallelSection,
    Section,
    SystemSection,
    TrainingSection,
)
from model_check.config.validate import rule_problems
from model_check.errors import ConfigError, Problem


class Config(Section):
    """Everything a run is told. Frozen: `with_values` gives a changed and checked copy."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    parallel: ParallelSection = ParallelSection()
    fsdp: FsdpSection = FsdpSection()
    system: SystemSection = SystemSection()
    checkpoint: CheckpointSection = CheckpointSection()
    launch: LaunchSection = LaunchSection()
    debug: DebugSection = DebugSection()
    logging: LoggingSection = LoggingSection()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def origins(self) -> dict[str, str]:
        """Dotted key -> "default", "preset debug", the path of a file, "--set", "flag --max-steps", …"""
        return {
            key: self._origins.get(key, "python" if self._was_set(key) else "default") for key in leaf_fields(Config)
        }

    def _was_set(self, key: str) -> bool:
        section, _, leaf = key.rpartition(".")
        return leaf in attrgetter(section)(self).model_fields_set

    def with_values(self, values: Mapping[str, Any], origin: str) -> Config:
        """A copy with these dotted keys changed; raises ConfigError with every problem of the result."""
        origins = self.origins | dict.fromkeys(values, origin)
        return build_config(flat_values(self) | dict(values), origins, source=origin)

    def accumulation(self, world_size: int) -> int:
        """Forward passes per optimizer step on a job of this many ranks (`check_world` says whether it divides)."""
        training = self.training
        if training.grad_accum_nums is not None:
            return training.grad_accum_nums
        if training.global_batch is None:
            return 1
        return max(1, training.global_batch // (training.batch_size * self.data_parallel(world_size)))

    def data_parallel(self, world_size: int) -> int:
        """How many ranks (or groups of ranks) see different samples."""
        return max(1, world_size // (self.parallel.tensor * self.parallel.pipeline * self.parallel.context))


def leaf_fields(section: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every dotted key below a section, with pydantic's record of its field."""
    leaves: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            leaves |= leaf_fields(kind, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = field
    return leaves


def flat_values(config: Config) -> dict[str, Any]:
    """Every dotted key with its value."""
    return {key: attrgetter(key)(config) for key in leaf_fields(Config)}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, leaf = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree


def _from_flat(flat: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    config = Config.model_validate(_nested(flat))
    config._origins = {key: origins[key] for key in flat}
    return config


def build_config(
    flat: Mapping[str, Any], origins: Mapping[str, str], source: str, problems: Iterable[Problem] = ()
) -> Config:
    """The config these values make; ConfigError with all that is wrong with them, and with `problems` before them."""
    known = leaf_fields(Config)
    usable = {key: value for key, value in flat.items() if key in known}
    found = [*problems, *unknown_key_problems(flat, origins, known)]
    try:
        config = _from_flat(usable, origins)
        found += rule_problems(config)
    except ValidationError as error:
        refused = schema_problems(error, usable, origins)
        faulty = {problem.key for problem in refused}
        rest = _from_flat({key: value for key, value in usable.items() if key not in faulty}, origins)
        # A rule about a refused value would judge the default that stands in for it.
        found += [*refused, *(rule for rule in rule_problems(rest) if not any(key in str(rule) for key in faulty))]
    if found:
        raise ConfigError(found, source)
    return config


def to_jsonable(config: Config) -> dict[str, Any]:
    """What config.json of a run directory holds; `from_jsonable` reads it back."""
    return {"values": config.model_dump(mode="json"), "origins": config.origins}
