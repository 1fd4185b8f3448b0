"""Runs the tests marked `long` and keeps how each ended and how many seconds it took.

python benchmarks/long_tests.py                  all of them
python benchmarks/long_tests.py -k kills         all arguments are passed on to pytest
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from result_file import result_path, write_result

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = subprocess.run(["bash", ROOT / "test.sh", "--long", f"--junitxml={report}", *sys.argv[1:]]).returncode
        tests = read_report(report)
    ended = Counter(test["ended"] for test in tests)
    print(f"{len(tests)} tests in {sum(test['seconds'] for test in tests):.0f} s: {dict(ended)}")
    write_result(result_path("long-tests"), {"exit_code": code, "ended": ended, "tests": tests})
    return code


def read_report(report: Path) -> list[dict[str, Any]]:
    """One entry for each test of pytest's report. A test that did not pass has a child element that says why."""
    return [
        {
            "test": f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}",
            "ended": next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed"),
            "seconds": round(float(case.get("time", 0)), 1),
        }
        for case in ElementTree.parse(report).iter("testcase")
    ]


if __name__ == "__main__":
    sys.exit(main())
