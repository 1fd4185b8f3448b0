"""A script of the user's under `model-check run`, to its end."""

from __future__ import annotations

from tests.conftest import Outcome, Shell


def run_watched(shell: Shell, script: str, *, nproc: int = 1, **env: str) -> Outcome:
    path = shell.folder / "train.py"
    path.write_text(script)
    done = shell.model_check("run", "--nproc", str(nproc), "--run-dir", str(shell.folder / "run"), str(path), **env)
    assert done.code == 0, done.out + done.err
    done.run_dir = shell.folder / "run"
    return done
