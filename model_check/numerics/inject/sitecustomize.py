"""Brings the black box into an unmodified script: the interpreter imports this file at its start.

A process that is a rank (its launcher says so in the environment) is instrumented now; any other Python process only
when it imports torch, which is the one thing a rank that was started by hand cannot do without. Tools such as pip pay
for one meta path entry. Whatever goes wrong here is written down and the script runs on: nothing may keep it from
starting. A sitecustomize of the user's own, or of the environment, is run as if this one were not there.
"""

# ruff: noqa: PTH100, PTH118, PTH120 -- pathlib would be one more import in every Python process of the job
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE_HOME = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
_RUN_DIR = os.environ.get("MODEL_CHECK_RUN_DIR", "")


def _note_failure(error):
    """One line in the run directory, where `diagnose` and a person look; standard error belongs to the script."""
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        with open(os.path.join(_RUN_DIR, "events", f"injection-{os.getpid()}.txt"), "a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        sys.stderr.write(f"model-check: this process is not recorded: {error!r}\n")


def _install():
    try:
        # The package beside this file, not another version that the script's environment may have.
        sys.path.insert(0, _PACKAGE_HOME)
        try:
            from model_check.numerics.bootstrap import follow
        finally:
            sys.path.remove(_PACKAGE_HOME)
        follow(_RUN_DIR)
    except Exception as error:
        _note_failure(error)


class _TorchIsComing:
    """A meta path entry that finds nothing; it is asked first, so it knows when torch is about to be imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(_TorchIsComing)
            _install()


def _is_rank_already():
    """Started as a rank by a launcher, and not a helper process that a rank started."""
    if os.environ.get("MODEL_CHECK_RANK_PID", str(os.getpid())) != str(os.getpid()):
        return False
    if any("multiprocessing" in word for word in sys.orig_argv[1:3]):
        return False
    known = ("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    return any(rank in os.environ and size in os.environ for rank, size in known)


def _run_the_next_sitecustomize():
    """What the interpreter would have imported had our folder not been first."""
    import importlib.machinery
    import importlib.util

    elsewhere = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    sys.path[:] = elsewhere
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if _RUN_DIR:
    if _is_rank_already():
        _install()
    else:
        sys.meta_path.insert(0, _TorchIsComing)
_run_the_next_sitecustomize()
