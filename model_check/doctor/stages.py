"""The stages in the order a cautious person would take them, each a generator of checks."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterator

from model_check.doctor.basic import check_basic
from model_check.doctor.check import Check, failed, foreign_words
from model_check.doctor.comm import check_comm
from model_check.doctor.disk import check_disk
from model_check.doctor.gpu import check_gpus
from model_check.doctor.hub import check_hub
from model_check.doctor.imports import check_imports
from model_check.doctor.ranks import check_ranks
from model_check.doctor.remedies import host_remedy
from model_check.doctor.settings import Settings
from model_check.doctor.training import check_training
from model_check.errors import ModelCheckError, UsageError


def _check_data(settings: Settings) -> Iterator[Check]:
    """Imported when it runs: a broken numpy or xxhash must not keep the other stages away."""
    from model_check.doctor.data import check_data

    yield from check_data(settings)


STAGES: dict[str, Callable[[Settings], Iterator[Check]]] = {
    "basic": check_basic,
    "imports": check_imports,
    "gpu": check_gpus,
    "train": check_training,
    "ranks": check_ranks,
    "comm": check_comm,
    "disk": check_disk,
    "hub": check_hub,
    "data": _check_data,
}


def chosen_stages(only: str | None) -> list[str]:
    """`basic,gpu` as a list in the order of the stages; all of them where nothing is named."""
    if only is None:
        return list(STAGES)
    words = [word.strip().lower() for word in only.split(",") if word.strip()]
    for word in words:
        if word not in STAGES:
            near = difflib.get_close_matches(word, STAGES, n=1)
            raise UsageError(
                f"--only {only} names the stage '{word}', which does not exist",
                remedy=f"did you mean {near[0]}?" if near else f"use {', '.join(STAGES)}",
            )
    if not words:
        raise UsageError("--only names no stage", remedy=f"use {', '.join(STAGES)}")
    return [stage for stage in STAGES if stage in words]


def examine(stage: str, settings: Settings) -> Iterator[Check]:
    """The checks of one stage. A fault that a check did not expect is itself an answer, and the other stages go on."""
    try:
        yield from STAGES[stage](settings)
    except ModelCheckError as error:
        yield failed(stage, error.message, error.remedy)
    except Exception as error:  # whatever an ill machine makes a check raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = foreign_words(f"{type(error).__name__}: {error}")
        fix = host_remedy(what, f"mend what the sentence names, then run this stage again with --only {stage}")
        yield failed(stage, f"the rest of this stage could not be done: {what} ({frame.filename}:{frame.lineno})", fix)
