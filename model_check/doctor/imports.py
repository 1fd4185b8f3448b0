"""Stage imports: every package in an interpreter of its own, with its seconds and its memory, the worst first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from model_check.doctor.check import Check, failed, foreign_words, passed, skipped, warned
from model_check.doctor.probe import Answer, ask, side_by_side
from model_check.doctor.remedies import host_remedy
from model_check.doctor.settings import Limits, Settings
from model_check.record.environment import package_versions


@dataclass(frozen=True)
class Package:
    """A module, the distribution that brings it, and whether training needs it."""

    module: str
    distribution: str
    needed: bool = True


PACKAGES = (
    Package("torch", "torch"),
    Package("numpy", "numpy"),
    Package("pydantic", "pydantic"),
    Package("yaml", "PyYAML"),
    Package("typer", "typer"),
    Package("rich", "rich"),
    Package("psutil", "psutil"),
    Package("pynvml", "nvidia-ml-py"),
    Package("tokenizers", "tokenizers"),
    Package("huggingface_hub", "huggingface_hub"),
    Package("datasets", "datasets"),
    Package("pyarrow", "pyarrow"),
    Package("safetensors", "safetensors"),
    Package("xxhash", "xxhash"),
    Package("filelock", "filelock"),
    Package("tensorboard", "tensorboard"),
    Package("model_check.engine.rank", "model-check"),
    Package("transformers", "transformers", needed=False),
    Package("wandb", "wandb", needed=False),
    Package("triton", "triton", needed=False),
    Package("flash_attn", "flash-attn", needed=False),
)


def check_imports(settings: Settings, packages: tuple[Package, ...] = PACKAGES) -> Iterator[Check]:
    # Four cores for each, so that their times stay what they are alone.
    tried = side_by_side([partial(_try, package, settings) for package in packages], settings.cores // 4)
    order = ("fail", "warn", "ok", "skip")
    for check, _ in sorted(tried, key=lambda found: (order.index(found[0].status), -found[1])):
        yield check


def _try(package: Package, settings: Settings) -> tuple[Check, float]:
    """The check, and the seconds that the import took."""
    limits, words = settings.limits, (package.module, package.distribution)
    answer = ask("import_one", *words, limit_s=limits.import_limit_s, environ=settings.environ)
    return judge_import(package, answer, limits), answer.value.get("seconds", answer.seconds)


def judge_import(package: Package, answer: Answer, limits: Limits) -> Check:
    name = f"import {package.module}"
    version = package_versions([package.distribution])[package.distribution]
    elsewhere = answer.value.get("shadows")
    reinstall = f"pip install --force-reinstall {package.distribution}"
    if elsewhere:
        reinstall = (
            f"rename {elsewhere}, or take its folder off PYTHONPATH: it hides the installed package of that name"
        )
    elif package.module.startswith("model_check"):
        reinstall = "mend the package that the sentence names; bash run.sh installs all that are needed"
    broken = failed if package.needed else warned
    if answer.problem:
        by_hand = f"{reinstall}; run it by hand: python -X faulthandler -c 'import {package.module}'"
        return broken(name, answer.problem, host_remedy(answer.problem, by_hand))
    if answer.value.get("missing"):
        if not package.needed:
            return skipped(name, "not installed, and not needed")
        return failed(name, "not installed", "bash run.sh installs it, or pip install -r requirements.txt")
    if "error" in answer.value:
        error = foreign_words(answer.value["error"])
        return broken(name, f"{error} ({answer.value['line']})", host_remedy(error, reinstall))
    seconds, size = answer.value["seconds"], answer.value["bytes"] / 2**20
    detail = f"{seconds:5.2f} s {size:5.0f} MiB" + (f"   {version}" if version else "")
    if elsewhere:
        return warned(name, f"{elsewhere} is imported, not the installed {version or 'package'}", reinstall)
    if seconds > limits.import_warn_s:
        fix = "a busy machine, or an environment on a network file system: put it on a local disk"
        return warned(name, detail, fix)
    return passed(name, detail)
