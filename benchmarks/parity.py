"""One table: the same seed and global batch under every layout, and how far each loss curve is from one rank's.

    python benchmarks/parity.py [--steps 6] [--layout "FSDP 2"]

Runs `model-check train` on CPU ranks (gloo), as a user would; ends with exit code 1 where a curve leaves the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TOLERANCE = 2e-5
NORM_TOLERANCE = 1e-3
# Printed under the table. That another seed is far outside is tested (tests/multiproc/test_parity_layouts.py).
JUSTIFICATION = f"""\
A layout adds the same fp32 terms in another order; nothing else may differ. Tolerances are relative.
  loss           {TOLERANCE:.0e}: each of the few hundred sums in a step rounds by 2**-24 = 6e-8, and the optimizer
                 carries that from step to step: 300 * 6e-8. Another seed is off by more than 5 times as much.
  gradient norm  {NORM_TOLERANCE:.0e}: it adds half a million squares, whose order differs most between layouts.
Findings on speed (MC7xx) are left out: whether a rank is slow depends on who else uses the machine. Any other finding
fails a row.
"""

SETTINGS = (
    "training.global_batch=8",
    "training.batch_size=1",
    "training.context_length=64",
    "training.learning_rate=1e-3",
    "model.num_layers=4",
    "data.samples=400",
    "logging.tensorboard=false",
)


@dataclass(frozen=True)
class Case:
    """A layout: how many ranks, and the keys that arrange them."""

    name: str
    ranks: int
    keys: tuple[str, ...] = ()


REFERENCE = Case("single", 1)
LAYOUTS = (
    Case("DDP 2", 2, ("parallel.strategy=ddp",)),
    Case("DDP 4", 4, ("parallel.strategy=ddp",)),
    Case("FSDP 2", 2, ("parallel.strategy=fsdp",)),
    Case("FSDP 4", 4, ("parallel.strategy=fsdp",)),
    Case("FSDP 2, freed after use", 2, ("parallel.strategy=fsdp", "fsdp.reshard=on")),
    Case("HSDP 2×2", 4, ("parallel.strategy=hsdp", "parallel.shard=2")),
    Case("FSDP+TP 2×2", 4, ("parallel.strategy=fsdp", "parallel.tensor=2")),
    Case("PP 2", 2, ("parallel.pipeline=2",)),
    Case("PP+FSDP 2×2", 4, ("parallel.pipeline=2", "parallel.strategy=fsdp")),
    Case("PP+TP 2×2", 4, ("parallel.pipeline=2", "parallel.tensor=2")),
    Case("CP 2", 2, ("parallel.context=2",)),
    Case("FSDP+CP 2×2", 4, ("parallel.strategy=fsdp", "parallel.context=2")),
    Case("FSDP 2, full recomputation", 2, ("parallel.strategy=fsdp", "parallel.activation_checkpointing=full")),
    Case(
        "FSDP 2, selective recomputation", 2, ("parallel.strategy=fsdp", "parallel.activation_checkpointing=selective")
    ),
)


@dataclass(frozen=True)
class Curve:
    losses: list[float]
    norms: list[float]
    seconds: float


def train(case: Case, folder: Path, steps: int) -> Curve:
    """Train under the layout; raises CalledProcessError with the command's output where it fails."""
    run_dir = folder / case.name.replace(" ", "-")
    words = [word for key in (*SETTINGS, *case.keys) for word in ("--set", key)]
    command = [sys.executable, "-m", "model_check.cli.main", "train", "--preset", "debug", "--nproc", str(case.ranks)]
    command += ["--run-dir", str(run_dir), "--max-steps", str(steps), "--set", "system.device=cpu", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=300)
    verdict = json.loads((run_dir / "verdict.json").read_text())
    # Whether a rank is slow (MC7xx) depends on who else uses this machine; everything else on the layout alone.
    wrong = [finding for finding in verdict["findings"] if not finding["code"].startswith("MC7")]
    assert verdict["outcome"] == "completed" and not wrong, verdict
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Curve(
        [record["loss"] for record in records],
        [record["grad_norm"] for record in records],
        sum(record["step_s"] for record in records[1:]) / max(1, len(records) - 1),
    )


def distance(curve: list[float], reference: list[float]) -> float:
    """The largest relative difference between two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(curve, reference, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layout", action="append", help="only this one; repeatable")
    arguments = parser.parse_args()
    chosen = [case for case in LAYOUTS if not arguments.layout or case.name in arguments.layout]
    if not chosen:
        parser.error(f"no such layout; there are {', '.join(case.name for case in LAYOUTS)}")
    far = 0
    with tempfile.TemporaryDirectory() as folder:
        reference = train(REFERENCE, Path(folder), arguments.steps)
        print(f"{'layout':34} {'last loss':>11} {'loss differs':>13} {'norm differs':>13} {'s/step':>8}")
        print(f"{REFERENCE.name:34} {reference.losses[-1]:11.6f} {'':>13} {'':>13} {reference.seconds:8.3f}")
        for case in chosen:
            curve = train(case, Path(folder), arguments.steps)
            apart, norms_apart = distance(curve.losses, reference.losses), distance(curve.norms, reference.norms)
            is_far = apart > TOLERANCE or norms_apart > NORM_TOLERANCE
            far += is_far
            print(
                f"{case.name:34} {curve.losses[-1]:11.6f} {apart:13.1e} {norms_apart:13.1e} {curve.seconds:8.3f}"
                f"{'  TOO FAR' if is_far else ''}",
                flush=True,
            )
    print(f"\n{JUSTIFICATION}", end="")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
