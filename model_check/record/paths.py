"""Where everything of one run lives."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from model_check.errors import RunDirError

DEFAULT_ROOT = Path(".outputs")
LOCK = "run.lock"
RUN_DIR_VARIABLE = "MODEL_CHECK_RUN_DIR"  # tells processes where to record; never a reason to kill one
PRIVATE = 0o700


def new_run_id() -> str:
    """Sorts by time; the process id keeps two runs of one second apart."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def new_path(root: Path | str | None) -> Path:
    return Path(root) if root else DEFAULT_ROOT / new_run_id()


def read_mode(text: str) -> int:
    """Parses `--run-dir-mode 0750`, as chmod would."""
    try:
        mode = int(text, 8)
    except ValueError:
        mode = 0
    if mode & 0o700 != 0o700 or mode > 0o7777:
        raise RunDirError(
            f"--run-dir-mode {text} is not a mode that lets the run use its own directory",
            remedy="give it in octal, e.g. 0700, 0750 or 2770",
        )
    return mode


def holds_a_run(path: Path) -> bool:
    return any(child.name != LOCK for child in path.iterdir())


@dataclass(frozen=True)
class RunDir:
    """The paths of a run. Making one touches nothing; `create` does."""

    root: Path
    mode: int = field(default=PRIVATE, compare=False)  # of the folders that a new run makes

    @classmethod
    def create(
        cls, root: Path | str | None = None, *, resuming: bool = False, resume_flag: str = "", mode: int = PRIVATE
    ) -> RunDir:
        """A new, empty run directory (or an existing one when resuming into it).

        `resume_flag`: the flag with which the caller's verb resumes, if it can; shown in the remedy. `mode`: of a new
        directory.
        """
        path = new_path(root)
        try:
            cls.make_root(path, mode)
            if not resuming and holds_a_run(path):
                raise cls.taken(path, resume_flag)
            for folder in (path / "blackbox", path / "events"):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise cls.cannot_be_made(path, error) from error
        return cls(path.resolve(), mode)

    @staticmethod
    def make_root(path: Path, mode: int) -> None:
        """Makes the directory itself; an existing one is left unchanged."""
        if path.exists() and not path.is_dir():
            raise RunDirError(f"--run-dir {path} is a file", remedy="name a directory that does not exist yet")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=mode & 0o700)
        except FileExistsError:
            return
        path.chmod(mode)  # whatever the umask

    @staticmethod
    def taken(path: Path, resume_flag: str) -> RunDirError:
        return RunDirError(
            f"--run-dir {path} already holds a run",
            remedy="name a new directory" + (f", or add {resume_flag} to continue into it" if resume_flag else ""),
        )

    @staticmethod
    def cannot_be_made(path: Path, error: OSError) -> RunDirError:
        return RunDirError(
            f"--run-dir {path} cannot be made: {error.strerror}", remedy="name a directory you may write to"
        )

    def set_aside_earlier_attempt(self) -> Path | None:
        """Moves what an earlier attempt left as evidence to attempts/N, so that its failure is not read as this one's.

        Metrics, configuration and checkpoints stay: they belong to the run, whatever number of attempts it takes.
        """
        left = [path for folder in self._evidence for path in folder.glob("*")]
        numbers = (int(path.name) for path in self._attempts.glob("[0-9]*"))
        return self._set_aside([*left, *filter(Path.exists, [self.verdict])], numbers)

    def set_aside_earlier_life(self, rank: int, world_size: int) -> Path | None:
        """The same, where another launcher starts the ranks and none of them may move what another writes already.

        Each rank moves its own files; rank 0 those that nobody writes in this life: the verdict, the supervisor's
        events, and what ranks left whose number does not exist any more.
        """
        found = [path for folder in self._evidence for path in folder.glob("rank-*")]
        left = [path for path in found if path.name.startswith(f"rank-{rank:05d}")]
        if rank == 0:
            left += [path for path in found if path.name[5:10].isdigit() and int(path.name[5:10]) >= world_size]
            left += [path for path in (self.supervisor_events, self.verdict) if path.exists()]
        # Every rank counts its own lives: where all of them lived equally often, they come to the same number.
        numbers = (int(path.parts[-3]) for path in self._attempts.glob(f"*/*/rank-{rank:05d}*"))
        return self._set_aside(left, numbers)

    @property
    def _evidence(self) -> tuple[Path, ...]:
        return self.events_dir, self.blackbox_dir, self.stacks_dir, self.flight_dir

    @property
    def _attempts(self) -> Path:
        return self.root / "attempts"

    def _set_aside(self, left: list[Path], numbers: Iterable[int]) -> Path | None:
        """Moves files to the attempt after those with these numbers."""
        if not left:
            return None
        aside = self._attempts / str(1 + max(numbers, default=0))
        for path in left:
            target = aside / path.relative_to(self.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        return aside

    @classmethod
    def open(cls, root: Path | str) -> RunDir:
        """An existing run directory, for readers."""
        path = Path(root)
        if not path.is_dir():
            raise RunDirError(f"there is no run directory {path}", remedy="pass the folder that the run printed")
        return cls(path.resolve())

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def verdict(self) -> Path:
        return self.root / "verdict.json"

    @property
    def plan(self) -> Path:
        """What the memory of a rank was planned to be, where its GPU is known."""
        return self.root / "plan.json"

    @property
    def logs(self) -> Path:
        """A link to the per-rank logs of this run."""
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        """A link to the folder that this run saves its checkpoints into."""
        return self.root / "checkpoints"

    @property
    def events_dir(self) -> Path:
        return self.root / "events"

    @property
    def blackbox_dir(self) -> Path:
        return self.root / "blackbox"

    @property
    def stacks_dir(self) -> Path:
        return self.root / "stacks"

    @property
    def flight_dir(self) -> Path:
        return self.root / "flight"

    @property
    def dumps_dir(self) -> Path:
        return self.root / "dumps"

    def ring(self, rank: int) -> Path:
        return self.blackbox_dir / f"rank-{rank:05d}.ring"

    def events(self, rank: int) -> Path:
        return self.events_dir / f"rank-{rank:05d}.jsonl"

    @property
    def supervisor_events(self) -> Path:
        """What the launcher saw from outside: starts, exits, signals, stalls."""
        return self.events_dir / "supervisor.jsonl"
