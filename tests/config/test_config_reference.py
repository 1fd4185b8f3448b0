"""The committed reference is the one the schema renders, and names every key and code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from model_check.config.codes import MEANINGS
from model_check.config.reference import render_reference
from model_check.config.schema import Config, leaf_fields

COMMITTED = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_reference_is_fresh(tmp_path: Path) -> None:
    fresh = tmp_path / "configuration.md"
    subprocess.run([sys.executable, "-m", "model_check.config.reference", str(fresh)], check=True)
    assert COMMITTED.read_text() == fresh.read_text(), (
        "run: python -m model_check.config.reference docs/configuration.md"
    )


def test_every_key_and_code_is_documented() -> None:
    page = render_reference()
    assert [key for key in leaf_fields(Config) if f"| `{key}` |" not in page] == []
    assert [code for code in MEANINGS if f"| {code} |" not in page] == []


def test_every_key_has_a_description() -> None:
    assert [key for key, field in leaf_fields(Config).items() if not field.description] == []
