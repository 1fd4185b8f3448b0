"""Eight ranks whose imports need more memory at once than there is: plain torchrun dies of it, the gate does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import BIN, ROOT, Shell

RANKS = 8
LIMIT_MIB = 1200
# As a package that compiles its kernels at import does: a lot of memory for a moment. It stays until every rank is in
# its own import, or for a second; so eight that may are all in at once, whatever the machine is busy with.
HEAVY_PACKAGE = """
import os, time
from pathlib import Path

compiling = bytearray(os.urandom(1 << 20) * 180)
Path(f"entered-{os.environ['RANK']}").touch()
until = time.monotonic() + float(os.environ["PATIENCE_S"])
while len(list(Path().glob("entered-*"))) < 8 and time.monotonic() < until:
    time.sleep(0.01)
del compiling
"""


def on_two_cores() -> None:
    """More cores would mean more slots, and the limit is not one that the launcher can see."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def under_the_limit(folder: Path, shell: Shell, patience_s: str, *command: str) -> tuple[dict[str, object], str]:
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed" / "__init__.py").write_text(HEAVY_PACKAGE)
    (folder / "train.py").write_text("import deepspeed\nprint('imported', flush=True)\n")
    warden = [str(BIN / "python"), str(ROOT / "benchmarks" / "memory_warden.py"), "--limit-mib", str(LIMIT_MIB), "--"]
    done = subprocess.run(
        [*warden, *command],
        cwd=folder,
        env=shell.environment(PATIENCE_S=patience_s),
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=on_two_cores,
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_a_storm_kills_torchrun_and_passes_through_the_gate(shell: Shell) -> None:
    torchrun = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={RANKS}", "train.py"]
    plain, _ = under_the_limit(shell.folder / "plain", shell, "60", *torchrun)
    assert plain["exit_code"] != 0 and plain["kills"], plain
    gated = [str(BIN / "model-check"), "run", "--start", "gate", "--nproc", str(RANKS), "--run-dir", "out", "train.py"]
    here, said = under_the_limit(shell.folder / "gated", shell, "0.5", *gated)
    assert (here["exit_code"], here["kills"]) == (0, []), said
    assert sorted(re.findall(r"^\[CPU(\d)\] imported$", said, re.M)) == [str(rank) for rank in range(RANKS)]
    assert isinstance(here["peak_mib"], float) and here["peak_mib"] < LIMIT_MIB
