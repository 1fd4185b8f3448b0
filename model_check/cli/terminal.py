"""Output to terminals and pipes that know no UTF-8, or are closed: a sign that cannot be shown stops no verb."""

from __future__ import annotations

import codecs
import io
import os
import sys

_PLAIN = {"✓": "+", "✗": "x", "→": "->", "–": "-", "…": "...", "×": "x", "µ": "u", "≥": ">=", "≤": "<=", "°": " "}
_HANDLER = "model-check-plain-signs"


def make_output_safe() -> None:
    """Called once, before anything is printed."""
    if sys.stdout is None:  # the shell's >&-
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 it lives as long as the process
    codecs.register_error(_HANDLER, _in_plain_signs)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_HANDLER)


def _in_plain_signs(error: UnicodeError) -> tuple[str, int]:
    """For what the encoding of a stream lacks, the sign that comes nearest."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unknown = error.object[error.start : error.end]
    return "".join(_PLAIN.get(sign, "?") for sign in unknown), error.end
