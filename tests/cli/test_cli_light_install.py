"""`pip install model-check` beside a user's torch: few packages, and every verb that needs no trainer works."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
    if rank == 1 and step == 2:
        raise ValueError("label 17 is out of range")
dist.destroy_process_group()
"""
NOT_REQUIRED = {"torch", "numpy", "pydantic", "tokenizers", "pyarrow", "datasets", "tensorboard", "transformers"}


def closure(*names: str) -> set[str]:
    """The distributions that installing these brings, including themselves."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(needed.name))
    return found


def test_the_base_install_adds_at_most_twelve_packages_to_torch() -> None:
    added = closure("model-check") - {"model-check"}
    assert not added & NOT_REQUIRED
    assert len(added - closure("torch")) <= 12, sorted(added)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with torch, the base install and nothing else."""
    home = tmp_path_factory.mktemp("light")
    venv.create(home, with_pip=False)
    site = next(home.glob("lib/python*/site-packages"))
    for name in closure("torch", "model-check") - {"model-check"}:
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    (site / "model_check").symlink_to(ROOT / "model_check")
    about = next(Path(sysconfig.get_path("purelib")).glob("model_check-*.dist-info"))
    (site / about.name).symlink_to(about)
    (home / "bin" / "py-spy").symlink_to(Path(sys.executable).parent / "py-spy")
    return home / "bin" / "python"


def run(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    command = [str(python), "-m", "model_check", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_run_names_a_fault_and_diagnose_explain_and_attach_answer(python: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(python, tmp_path, "run", "--nproc", "2", "--run-dir", "out", "train.py")
    (finding, *_) = json.loads((tmp_path / "out" / "verdict.json").read_text())["findings"]
    assert (done.returncode, finding["code"], finding["ranks"], finding["location"]) == (1, "MC301", [1], "train.py:12")
    assert "label 17 is out of range" in run(python, tmp_path, "diagnose", "out").stdout
    assert run(python, tmp_path, "explain", "MC204").stdout.startswith("MC204")
    assert run(python, tmp_path, "explain", "MC806").stdout.startswith("MC806")
    assert run(python, tmp_path, "attach", str(os.getpid())).returncode in (0, 1)
    missing = run(python, tmp_path, "checkpoint", "verify", "nowhere")
    assert (missing.returncode, missing.stderr.splitlines()[0][:33]) == (2, "model-check: error: there is no n")


def test_one_line_in_a_script_records_it(python: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import model_check; model_check.observe(run_dir='out')\n"
        "import torch\n"
        "weight = torch.nn.Parameter(torch.ones(2))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "weight.sum().backward()\n"
        "optimizer.step()\n"
        "raise ValueError('label 17 is out of range')\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    subprocess.run([python, "train.py"], cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    verdict = json.loads(run(python, tmp_path, "diagnose", "--json", "out").stdout)
    (finding,) = verdict["findings"]
    assert (finding["code"], finding["ranks"], finding["location"]) == ("MC301", [0], "train.py:7")
    assert (verdict["outcome"], verdict["steps_completed"]) == ("failed", 1)


@pytest.mark.parametrize("verb", ["train", "prepare", "plan"])
def test_a_verb_of_the_trainer_says_what_to_install(python: Path, tmp_path: Path, verb: str) -> None:
    done = run(python, tmp_path, verb)
    assert done.returncode == 1
    assert done.stderr == (
        "model-check: error: the package pydantic is not installed; "
        'pip install "model-check[train]" brings it, and so does bash run.sh in a clone\n'
    )
