"""Every planted fault is named: code, rank, line, words, in time, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from expectations import FAULTS, SCRIPTS, Fault
from faultrun import observe_fault, why_not_here

pytestmark = pytest.mark.timeout(240)


def cases() -> list[ParameterSet]:
    marked = []
    for fault in FAULTS:
        marks = [] if fault.quick else [pytest.mark.slow]
        if fault.needs == "gpu":
            marks.append(pytest.mark.gpu)
        marked.append(pytest.param(fault, id=fault.name, marks=marks))
    return marked


@pytest.mark.parametrize("fault", cases())
def test_the_fault_is_named(fault: Fault, tmp_path: Path) -> None:
    if reason := why_not_here(fault.needs):
        pytest.skip(reason)
    seen = observe_fault(fault, tmp_path)
    assert seen.problems == [], f"{seen.problems}\n{seen.output[-4000:]}"


def test_every_script_is_in_the_table() -> None:
    scripts = {path.stem for path in SCRIPTS.glob("*.py")} - {"faultclock"}
    assert scripts == {fault.path.stem for fault in FAULTS}


def test_no_script_knows_of_the_black_box() -> None:
    assert [path.name for path in SCRIPTS.glob("*.py") if "model_check" in path.read_text()] == []
