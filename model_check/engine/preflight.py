"""Finds problems in the files that would stop every rank, and reports them once, before any rank starts.

Only the headers of weights are read, which takes milliseconds even for 70B.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model_check.checkpoint.weight_files import kind_of, open_weights
from model_check.config import Config, codes, resolve_shape, weights_file
from model_check.data import PreparedData, check_vocabulary, load_tokenizer
from model_check.engine import resume as resuming
from model_check.engine.data_and_shape import shape_of
from model_check.engine.evaluate import check_held_out
from model_check.engine.feed import open_loader
from model_check.engine.place import Place
from model_check.errors import CheckpointError, DataError, HubUnavailable, ModelError, UsageError
from model_check.models import build_meta_model, check_pretrained


def check_weights(config: Config, resume: str | None) -> None:
    """Checks that the model's initial weights exist, are complete and fit the model."""
    with _as_usage_error(codes.MODEL_FOLDER):
        if config.model.init == "pretrained" and config.model.model_path:
            model = build_meta_model(shape_of(config))
            path = weights_file(config.model.model_path)
            if path is None:
                check_pretrained(model, config.model.model_path)
            else:
                resuming.fitting_tensors(open_weights(path), resuming.model_shapes(model), remedy=resuming.PRETRAINED)
        if resume not in (None, "auto") and not _is_checkpoint(Path(resume)):
            resuming.fitting_tensors(
                open_weights(Path(resume)), resuming.model_shapes(build_meta_model(shape_of(config)))
            )


def _is_checkpoint(path: Path) -> bool:
    """Whether it is a checkpoint of ours, which the ranks verify as they read it, or a folder of them."""
    try:
        return kind_of(path) == "sharded"
    except CheckpointError:
        return True


def check_data(config: Config, world_size: int, data: PreparedData) -> None:
    """Checks that there are samples for a global batch and an evaluation, and a row in the model for every token."""
    with _as_usage_error("MC904"):
        open_loader(config, Place(0, world_size), data.train)
        if config.training.eval_interval and data.valid is not None:
            check_held_out(config, world_size, data.valid)
        shape = resolve_shape(config.model, load_tokenizer(config.data.tokenizer).vocab_size)
        check_vocabulary(data.train, shape.vocab_size)


@contextmanager
def _as_usage_error(code: str) -> Iterator[None]:
    """An unusable file that the configuration names is a configuration error."""
    try:
        yield
    except HubUnavailable:
        raise
    except (ModelError, CheckpointError, DataError) as error:
        raise UsageError(error.message, remedy=error.remedy, code=error.code or code) from error
