"""Finds what grows in a rank whose memory grows: counts its containers twice, seconds apart, and finds the line that
fills the one that grew.

Between the counts it keeps only numbers. It never runs the garbage collector, and after a slow count it stops.
"""

from __future__ import annotations

import ast
import gc
import inspect
import linecache
import sys
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

from model_check.blackbox.box import BOX
from model_check.record.events.memory import Growth

_CONTAINERS = frozenset({list, dict, set, deque, defaultdict, OrderedDict})  # exact types: no code of the script runs
_LEAST_ITEMS = 16
_LEAST_GROWTH = 5
_LEAST_SHARE = 0.01  # of the resident memory, between two marks
_IN_A_ROW = 2  # marks with that growth: at its start every script grows once
_APART_S = 4.0
_MOST_OBJECTS = 3_000_000
_LONGEST_S = 1.0  # a count this slow is the last
_MOST_EVENTS = 3
_GRAPH_BYTES = 1 << 16  # minimum size assumed for a tensor's graph, for comparison only
_FILLS = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put"})


class _State:
    last_rss = 0
    grown = 0  # marks in a row
    counted: dict[int, int] | None = None
    counted_at = 0.0
    events = 0


def look(resident: int) -> None:
    """Called with each resident-memory reading: counts if it keeps growing, and reports growth since the last count."""
    before, _State.last_rss = _State.last_rss, resident
    _State.grown = _State.grown + 1 if before and resident >= before * (1 + _LEAST_SHARE) else 0
    if _State.events >= _MOST_EVENTS or _State.grown < _IN_A_ROW:
        return
    began = time.monotonic()
    try:
        if _State.counted is None or began - _State.counted_at >= _APART_S:
            large = {id(thing): thing for thing in _living() if len(thing) >= _LEAST_ITEMS}
            if _State.counted is not None:
                _tell(_State.counted, large, began - _State.counted_at)
                _State.events += 1
            _State.counted, _State.counted_at = {at: len(thing) for at, thing in large.items()}, began
    except Exception:
        _State.events = _MOST_EVENTS  # it would fail again
        raise
    if time.monotonic() - began > _LONGEST_S:
        _State.events = _MOST_EVENTS


def _living() -> Iterator[Any]:
    """Containers that the garbage collector tracks, and named ones: it does not track a dict of plain numbers."""
    objects = gc.get_objects()
    if len(objects) > _MOST_OBJECTS:
        return
    yield from [thing for thing in objects if type(thing) in _CONTAINERS]
    yield from (thing for _, _, thing in _named(objects) if type(thing) in _CONTAINERS)


def _named(objects: list[Any]) -> Iterator[tuple[str, str, Any]]:
    """(name, file, value): the script's globals, locals of its running functions, attributes of its objects."""
    modules = [m for m in list(sys.modules.values()) if type(m) is ModuleType and getattr(m, "__file__", None)]
    for module in modules:
        if BOX.code.shown(str(module.__file__)) is not None:
            yield from ((name, str(module.__file__), value) for name, value in list(vars(module).items()))
    frame = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if BOX.code.shown(file) is not None:
            yield from ((name, file, value) for name, value in _locals_of(frame))
        frame = frame.f_back  # type: ignore[assignment]
    files = {m.__name__: str(m.__file__) for m in modules if BOX.code.shown(str(m.__file__)) is not None}
    kinds = {kind: files[kind.__module__] for kind in set(map(type, objects)) if kind.__module__ in files}
    for thing in [thing for thing in objects if type(thing) in kinds]:
        own = object.__getattribute__(thing, "__dict__") if type(thing).__dictoffset__ else {}
        yield from ((name, kinds[type(thing)], value) for name, value in list(own.items()))


def _locals_of(frame: FrameType) -> list[tuple[str, Any]]:
    """Before Python 3.13 a frame keeps what is read here, and with it a step's tensors for as long as it runs."""
    found = list(frame.f_locals.items())
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # never a module's own dict
        frame.f_locals.clear()
    return found


def _tell(known: dict[int, int], large: dict[int, Any], seconds: float) -> None:
    """Reports the container whose new items hold most; `known` has the sizes at the count before, by address."""
    grown = {at: len(thing) - known.get(at, len(thing)) for at, thing in large.items()}
    worth = {at: _bytes(_newest(large[at])) * more for at, more in grown.items() if more >= _LEAST_GROWTH}
    if not worth:
        return
    largest = max(worth, key=lambda at: worth[at])
    thing = large[largest]
    name, file = next(((n, f) for n, f, value in _named(gc.get_objects()) if value is thing), ("", ""))
    BOX.event(
        Growth(
            container=type(thing).__name__,
            name=name,
            file=(BOX.code.shown(file) or file) if file else "",
            line=_filling_line(file, name) if name else 0,
            before=known[largest],
            now=len(thing),
            seconds=round(seconds, 1),
            item=_described(_newest(thing)),
            bytes=worth[largest],
        )
    )


def _newest(container: Any) -> Any:
    """One of its items; of a dict, the newest value."""
    try:
        if isinstance(container, dict):
            return container[next(reversed(container))]
        return next(iter(container)) if isinstance(container, set) else container[-1]
    except (RuntimeError, StopIteration, IndexError, KeyError):  # another thread is changing it
        return None


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def _bytes(value: Any, depth: int = 0) -> int:
    if _is_tensor(value):
        return int(value.nbytes) + (_GRAPH_BYTES if value.grad_fn is not None else 0)
    size = sys.getsizeof(value, 64)
    if depth < 3 and type(value) in (list, tuple, dict):
        inner = list(value.values() if type(value) is dict else value)[:64]
        size += sum(_bytes(item, depth + 1) for item in inner)
    return size


def _described(value: Any, depth: int = 0) -> str:
    """`tuple of (Tensor float32[] with its graph, Tensor float32[2048, 64])`"""
    if _is_tensor(value):
        dtype = str(value.dtype).removeprefix("torch.")
        graph = " with its graph" if value.grad_fn is not None else ""
        return f"Tensor {dtype}{list(value.shape)} on {value.device.type}{graph}"
    name = type(value).__name__
    if depth < 2 and type(value) in (list, tuple) and 0 < len(value) <= 4:
        return f"{name} of ({', '.join(_described(item, depth + 1) for item in value)})"
    if depth < 2 and type(value) is dict and 0 < len(value) <= 4:
        inner = [f"{str(key)[:20]}: {_described(item, depth + 1)}" for key, item in list(value.items())]
        return f"dict of ({', '.join(inner)})"
    return name


def _filling_line(file: str, name: str) -> int:
    """The line that adds to a container of this name, if its file has only one such line."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return 0
    lines = {getattr(node, "lineno", 0) for node in ast.walk(tree) if _fills(node, name)}
    return lines.pop() if len(lines) == 1 else 0


def _fills(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLS:
        return _last_name(node.func.value) == name
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, (ast.Add, ast.BitOr)) and _last_name(node.target) == name
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Subscript) and _last_name(t.value) == name for t in node.targets)
    return False


def _last_name(node: ast.AST) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", None) or ""
