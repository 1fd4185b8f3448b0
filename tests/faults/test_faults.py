"""Every planted fault is named: code, rank, line, words, in time, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from expectations import FAULTS, HEALTHY, LONG, QUICK, SCRIPTS, Fault, markers_of
from faultrun import observe_fault, why_not_here

pytestmark = pytest.mark.timeout(240)


def codes_of(faults: Iterable[Fault]) -> set[str]:
    return {code for fault in faults for code in fault.codes}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.name, marks=[getattr(pytest.mark, m) for m in markers_of(f)]) for f in FAULTS]
)
def test_the_fault_is_named(fault: Fault, tmp_path: Path) -> None:
    if reason := why_not_here(fault.needs):
        pytest.skip(reason)
    seen = observe_fault(fault, tmp_path)
    assert seen.problems == [], f"{seen.problems}\n{seen.output[-4000:]}"


def test_the_quick_part_has_every_family_and_three_controls() -> None:
    anywhere = [fault for fault in FAULTS if not fault.needs]
    families = {code[:3] for code in codes_of(anywhere)}
    assert families >= {"MC1", "MC2", "MC3", "MC4", "MC6", "MC7", "MC9"}
    assert {code[:3] for code in codes_of(fault for fault in anywhere if fault.name in QUICK)} == families
    assert len(QUICK & {control.name for control in HEALTHY}) >= 3


def test_no_code_is_left_to_the_long_part() -> None:
    assert codes_of(FAULTS) == codes_of(fault for fault in FAULTS if fault.name not in LONG)
    assert not QUICK & LONG
    assert {*QUICK, *LONG} <= {case.name for case in (*FAULTS, *HEALTHY)}


def test_every_script_is_in_the_table() -> None:
    scripts = {path.stem for path in SCRIPTS.glob("*.py")} - {"faultclock"}
    assert scripts == {fault.path.stem for fault in FAULTS}


def test_no_script_knows_of_the_black_box() -> None:
    assert [path.name for path in SCRIPTS.glob("*.py") if "model_check" in path.read_text()] == []
