"""Does the black box work beside a user's own torch? Runs part of the fault table in throw-away environments.

    python benchmarks/torch_versions.py --out benchmarks/results/DATE-torch-versions.json

Each environment gets one version of torch (2.13.0 may be a CPU build; the others bring about 3 GB of CUDA libraries),
numpy, and `pip install .`, without the trainer. The cases need only torch: faults of each family, and three healthy
scripts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from result_file import write_result

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("2.6.0", "2.8.0", "2.11.0", "2.13.0", "2.15.0")
CASES = (
    *("order_mismatch", "swapped_pair", "dtype_mismatch", "loader_stuck", "barrier_rank0", "stopped", "lock_deadlock"),
    *("exception_ddp", "early_exit", "killed_from_outside", "swallowed_exception", "directory_race", "p2p_cycle"),
    *("nan_sample", "sqrt_at_zero", "root_in_loss", "rate_spike", "replica_drift", "straggler"),
    *("exception_under_torchrun", "weights_too_large", "checkpoint_cut_off", "token_without_row"),
    *("join_uneven", "own_spawn", "async_ops"),
)
_ROW = re.compile(r"^\| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \| (.*) \|$")
_COLUMNS = ("code", "rank", "line", "seconds", "result")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--cases", nargs="+", default=CASES, help="names of tests/faults/expectations.py")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {}
    for version in options.versions:
        with tempfile.TemporaryDirectory(prefix="torch-version-") as folder:
            results[version] = try_version(version, Path(folder), options.cases)
        named = sum(row["result"] == "ok" for row in results[version].values())
        print(f"torch {version}: {named} of {len(results[version])} as promised", flush=True)
    if options.out:
        write_result(options.out, {"cases": results}, ())
    return int(any(row["result"] != "ok" for rows in results.values() for row in rows.values()))


def try_version(version: str, folder: Path, cases: list[str]) -> dict[str, dict[str, str]]:
    """One row of the fault table for each case: code, rank, line, seconds, and any broken promise."""
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    subprocess.run([*pip, f"torch=={version}", "numpy"], check=True)
    subprocess.run([*pip, ROOT], check=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    table = subprocess.run(
        [python, ROOT / "tests" / "faults" / "faultrun.py", *cases],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    print(table, flush=True)
    rows = [match.groups() for line in table.splitlines() if (match := _ROW.match(line))]
    return {name: dict(zip(_COLUMNS, rest, strict=True)) for name, *rest in rows if name in cases}


if __name__ == "__main__":
    sys.exit(main())
