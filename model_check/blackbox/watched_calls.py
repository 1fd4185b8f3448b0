"""Single functions worth a span wherever they are: files, hub, trackers, standard input. One table."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from model_check.blackbox.spans import Describe, is_wrapped, spanned

_MAX_DETAIL = 200


def _first_argument(*names: str) -> Describe:
    """The detail of a span: what is saved or fetched, when that is a short text."""

    def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        for value in (*args[:3], *(kwargs.get(name) for name in names)):
            if isinstance(value, (str, os.PathLike)):
                return os.fspath(value)[:_MAX_DETAIL]
        return ""

    return describe


class Target(NamedTuple):
    """One function: `owner` is a class in the module, or empty."""

    module: str
    owner: str
    name: str
    phase: str
    describe: Describe | None = None


_PATH = _first_argument("f", "path", "checkpoint_id", "filename", "save_directory")
_REPOSITORY = _first_argument("repo_id", "path")
TARGETS = (
    Target("torch.serialization", "", "save", "save", _PATH),
    Target("torch.serialization", "", "load", "load", _PATH),
    Target("torch.distributed.checkpoint.state_dict_saver", "", "save", "save", _PATH),
    Target("torch.distributed.checkpoint.state_dict_saver", "", "async_save", "save", _PATH),
    Target("torch.distributed.checkpoint.state_dict_loader", "", "load", "load", _PATH),
    Target("safetensors.torch", "", "save_file", "save", _PATH),
    Target("safetensors.torch", "", "load_file", "load", _PATH),
    Target("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", "save", _PATH),
    Target("huggingface_hub.file_download", "", "hf_hub_download", "hub", _REPOSITORY),
    Target("huggingface_hub._snapshot_download", "", "snapshot_download", "hub", _REPOSITORY),
    Target("datasets.load", "", "load_dataset", "hub", _REPOSITORY),
    Target("wandb", "", "init", "tracker", lambda args, kwargs: "wandb.init"),
    Target("mlflow", "", "start_run", "tracker", lambda args, kwargs: "mlflow.start_run"),
    Target("comet_ml", "", "start", "tracker", lambda args, kwargs: "comet_ml.start"),
    Target("neptune", "", "init_run", "tracker", lambda args, kwargs: "neptune.init_run"),
    Target("trackio", "", "init", "tracker", lambda args, kwargs: "trackio.init"),
)


def patches() -> dict[str, Callable[[ModuleType], None]]:
    """What to do with each module of the table once it has been imported."""
    by_module: dict[str, list[Target]] = {}
    for target in TARGETS:
        by_module.setdefault(target.module, []).append(target)
    return {name: _patch_all(targets) for name, targets in by_module.items()}


def _patch_all(targets: list[Target]) -> Callable[[ModuleType], None]:
    def patch(module: ModuleType) -> None:
        for target in targets:
            owner = getattr(module, target.owner, None) if target.owner else module
            original = getattr(owner, target.name, None)
            # A package that lacks the name is another version, or only a folder of that name.
            if original is not None and not is_wrapped(original):
                setattr(owner, target.name, spanned(original, target.phase, describe=target.describe))

    return patch


def watch_standard_input() -> None:
    """input(), and reads of sys.stdin: a rank that waits for a person waits for ever."""
    builtins.input = spanned(builtins.input, "input", describe=lambda args, kwargs: "input()")
    stream = sys.stdin
    for name in ("read", "readline", "readlines"):
        method = getattr(stream, name, None)
        if method is None:
            continue
        try:
            setattr(stream, name, spanned(method, "input", describe=_reading(name)))
        except AttributeError:
            # A stream type without room for attributes; the launcher still sees the read(2).
            return


def _reading(name: str) -> Describe:
    return lambda args, kwargs: f"sys.stdin.{name}"
