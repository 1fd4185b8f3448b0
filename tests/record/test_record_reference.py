"""docs/run-directory.md is the page that the records render, and shows every kind of event with its fields."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from model_check.record.events import KINDS, Event
from model_check.record.reference import render_reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "run-directory.md"


def test_the_committed_page_is_fresh() -> None:
    remedy = "run: python -m model_check.record.reference docs/run-directory.md"
    assert PAGE.read_text(encoding="utf-8") == render_reference(), remedy


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_field_of_an_event_is_on_the_page(kind: str) -> None:
    section = render_reference().partition(f"### `{kind}`\n")[2].partition("\n### ")[0]
    own = {field.name for field in fields(KINDS[kind])} - {field.name for field in fields(Event)}
    assert all(f"| `{name}` |" in section for name in own)
