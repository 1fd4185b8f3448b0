"""Observe: what a rank leaves behind while it works: events, metrics, spans, black box. May import rundir."""

from __future__ import annotations

import os


def inject_path() -> str:
    """The folder to put in front of PYTHONPATH: its sitecustomize brings the black box into every Python below."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")  # noqa: PTH100, PTH118, PTH120 pathlib is not loaded in the ranks yet
