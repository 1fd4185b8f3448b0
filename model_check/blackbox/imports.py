"""Runs a function right after a module has been imported, before anybody can take a name out of it.

The module's own loader does the work and stays its loader: only this one call of `exec_module` is wrapped. Big packages
also get a span of phase "import", so that a start that takes its time shows what it takes it for, and pass the gate
where the job has one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from model_check.blackbox import compiler
from model_check.blackbox.box import BOX
from model_check.blackbox.gate import through_the_gate
from model_check.blackbox.spans import span
from model_check.record.events.memory import RecordingFailed

Patch = Callable[[ModuleType], None]


class PostImport:
    """A meta path entry that lets the others find the module, and then watches it being executed."""

    def __init__(self, patches: dict[str, Patch], slow_packages: frozenset[str]) -> None:
        self._patches = patches
        self._slow = slow_packages
        self._watched = slow_packages.union(patches)
        self._finding: set[str] = set()

    def install(self) -> None:
        """Takes its place in front, and catches up on what is already imported."""
        sys.meta_path.insert(0, self)
        replaced: dict[int, Any] = {}
        for name in self._patches:
            module = sys.modules.get(name)
            if module is not None:
                before = dict(vars(module))
                self._patch(name, module)
                changed = {key: new for key, new in vars(module).items() if before.get(key) is not new}
                replaced |= {id(before[key]): new for key, new in changed.items() if key in before}
        if replaced:
            _replace_aliases(replaced)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if (name not in self._watched and not name.startswith(compiler.OURS)) or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = _find_elsewhere(self, name, path, target)
        finally:
            self._finding.discard(name)
        if spec is not None and spec.loader is not None:
            self._watch(name, spec.loader)
        return spec

    def _patch(self, name: str, module: ModuleType) -> None:
        """The script's import succeeds whatever happens to our patch."""
        patch = self._patches.get(name)
        if patch is None:
            return
        try:
            patch(module)
        except Exception as error:
            BOX.event(RecordingFailed.by(error, f"calls of {name}"))

    def _watch(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            with ExitStack() as entered:
                if name in self._slow:
                    entered.enter_context(through_the_gate(name))
                    entered.enter_context(span("import", name))
                execute(module)
            self._patch(name, module)
            if name.startswith(compiler.OURS):
                compiler.imported(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            # A loader without room for attributes (a built-in one): there is nothing of ours in such a module.
            return


def _replace_aliases(replaced: dict[int, Any]) -> None:
    """`from torch.distributed import all_reduce` took the name before it was wrapped: give it the wrapped one."""
    ours = __name__.rpartition(".")[0]
    for module in [module for name, module in sys.modules.items() if not name.startswith(ours)]:
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for key in [key for key, value in list(names.items()) if id(value) in replaced]:
                names[key] = replaced[id(names[key])]


def _find_elsewhere(us: PostImport, name: str, path: Sequence[str] | None, target: Any) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is us:
            continue
        find = getattr(finder, "find_spec", None)
        spec = find(name, path, target) if find is not None else None
        if spec is not None:
            return spec
    return None
