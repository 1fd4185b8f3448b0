"""Observe: what a rank leaves behind while it works: events, metrics, spans, black box. May import rundir."""

from __future__ import annotations

from pathlib import Path


def inject_path() -> str:
    """The folder to put in front of PYTHONPATH: its sitecustomize brings the black box into every Python below."""
    return str(Path(__file__).resolve().parent / "inject")
