"""Every result says how it came about: command, date, commit, versions, hardware. Every result that is cited exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.result_file import FIELDS, write_result
from tests.conftest import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
# Results from before the commit was recorded name the one that brought them; one of several runs names them all.
_COMMIT = re.compile(r"(added in |last changed in )?[0-9a-f]{7,40}(-dirty)?(, [0-9a-f]{7,40})*")


def faults_of(result: dict[str, Any]) -> list[str]:
    """Fields that are absent or say nothing."""
    versions, hardware = result.get("versions"), result.get("hardware")
    good = {
        "command": str(result.get("command")).startswith(
            ("python benchmarks/", "python tests/faults/", "model-check ", "bash ")
        ),
        "date": re.fullmatch(r"\d{4}-\d\d-\d\d", str(result.get("date"))) is not None,
        "commit": _COMMIT.fullmatch(str(result.get("commit"))) is not None,
        "versions": isinstance(versions, dict) and len(versions) > 0 and all(versions.values()),
        "hardware": isinstance(hardware, dict) and any(hardware.get(key) for key in ("gpu", "gpus", "cpu", "machine")),
    }
    assert tuple(good) == FIELDS
    return [field for field, right in good.items() if not right]


@pytest.mark.parametrize("path", sorted(RESULTS.iterdir()), ids=lambda path: path.name)
def test_a_result_says_how_it_came_about(path: Path) -> None:
    result = json.loads(path.read_text())
    assert faults_of(result) == []
    assert path.name.startswith(result["date"])


def test_what_a_benchmark_writes_has_every_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "loader.py"), "--name", "two words"])
    write_result(tmp_path / "new" / "result.json", {"rows": [1]}, ("pytest", "no-such-package"))
    result = json.loads((tmp_path / "new" / "result.json").read_text())
    assert result["command"] == "python benchmarks/loader.py --name 'two words'" and result["rows"] == [1]
    assert result["versions"].keys() == {"python", "pytest"}
    clone = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert result["commit"].removesuffix("-dirty") == clone.stdout.strip()
    assert faults_of(result) == ([] if clone.returncode == 0 else ["commit"])


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_missing_or_empty_is_noticed(field: str) -> None:
    whole = json.loads((RESULTS / "2026-11-18-supervisor-week.json").read_text())
    assert faults_of({name: value for name, value in whole.items() if name != field}) == [field]
    assert faults_of({**whole, field: type(whole[field])()}) == [field]


def test_every_result_that_a_page_cites_exists() -> None:
    cited = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"benchmarks/results/([\w.-]+\.json)", page.read_text())
    }
    assert len(cited) >= 15
    assert {(page, name) for page, name in cited if not (RESULTS / name).exists()} == set()
