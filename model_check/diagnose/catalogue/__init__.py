"""The catalogue: every code with its long form. `explain` and docs/errors.md are made from it."""

from __future__ import annotations

from model_check.diagnose.catalogue.checkpoints import CHECKPOINTS
from model_check.diagnose.catalogue.crashing import CRASHING
from model_check.diagnose.catalogue.data import DATA
from model_check.diagnose.catalogue.entry import COMMON_FACTS, Entry
from model_check.diagnose.catalogue.hanging import HANGING
from model_check.diagnose.catalogue.memory import MEMORY
from model_check.diagnose.catalogue.numerics import NUMERICS
from model_check.diagnose.catalogue.pages import as_markdown, as_text
from model_check.diagnose.catalogue.slowness import SLOWNESS
from model_check.diagnose.catalogue.starting import STARTING

CATALOGUE: dict[str, Entry] = dict(
    sorted({**STARTING, **HANGING, **CRASHING, **NUMERICS, **MEMORY, **CHECKPOINTS, **SLOWNESS, **DATA}.items())
)


def explain(code: str) -> str:
    """The long form of a code, for a terminal; KeyError where there is no such code."""
    return as_text(code, CATALOGUE[code])


def errors_page() -> str:
    """docs/errors.md."""
    return as_markdown(CATALOGUE)


__all__ = ["CATALOGUE", "COMMON_FACTS", "Entry", "errors_page", "explain"]
