"""What a stack says about what its thread is doing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from model_check.diagnose.source import source_text
from model_check.record.stacks import Frame, ThreadStack, innermost_user

_LOCK_FUNCTIONS = {"acquire", "__enter__", "wait", "join", "_wait_for_tstate_lock", "get", "put", "result", "wait_for"}
_LOCK_FILES = ("threading.py", "queue.py", "concurrent/futures/_base.py", "multiprocessing/synchronize.py")
_LOCK_TEXT = re.compile(
    r"\.acquire\(|\block\b|\bwith\s+[\w.\[\]]*(lock|mutex|cond|sem)\w*|\.join\(\s*\)|\.wait\(\s*\)", re.I
)
_NETWORK = (
    "huggingface_hub/",
    "datasets/",
    "wandb/",
    "mlflow/",
    "requests/",
    "urllib3/",
    "httpx/",
    "httpcore/",
    "comet_ml/",
)
_NETWORK_STDLIB = ("ssl.py", "socket.py", "http/client.py", "urllib/request.py")
# open() counts as reading if its line shows no mode.
_WRITE_TEXT = re.compile(
    r"\bopen\(.*([\"'][rbt]*[wax+][rbtwax+]*[\"']|O_WRONLY|O_RDWR)|\.write\(|\.flush\(|fsync"
    r"|torch\.save\(|save_file\(|write_text\(|write_bytes\("
)
# Files that are on the stack while something compiles, never while the compiled code runs.
_COMPILER = re.compile(
    r"/torch/(_dynamo/convert_frame|_inductor/(compile_fx|graph|scheduler|codecache|async_compile|cpp_builder)"
    r"|utils/cpp_extension)\.py$|/torch/_inductor/codegen/|/triton/compiler/"
)
_INPUT_TEXT = re.compile(r"\binput\(|stdin\.(read|readline|buffer)|\bgetpass\(|in sys\.stdin")


def _inner_part(thread: ThreadStack) -> Iterable[Frame]:
    """The frames below the user's innermost one: what the user's line called."""
    user = thread.user_frame
    for frame in thread.frames:
        if frame is user:
            return
        yield frame


def waits_for_lock(thread: ThreadStack) -> bool:
    """About to take a lock, which is C code, so that the source line decides, or the standard library's way to it."""
    inner = list(_inner_part(thread))
    if inner:
        takes = inner[0].function.rpartition(".")[2] in ("acquire", "__enter__")
        return takes and any(inner[0].file.endswith(name) for name in _LOCK_FILES)
    frame = thread.user_frame
    return frame is not None and not thread.active and bool(_LOCK_TEXT.search(source_text(frame)))


def waits_between_threads(thread: ThreadStack) -> bool:
    """In a wait of the standard library that only another thread can end: a queue, an event, a condition, a future."""
    inner = next(iter(_inner_part(thread)), None)
    if inner is None or not any(inner.file.endswith(name) for name in _LOCK_FILES):
        return False
    return inner.function.rpartition(".")[2] in _LOCK_FUNCTIONS


def network_package(thread: ThreadStack) -> str | None:
    """The hub, tracker or network library the thread is inside of."""
    for frame in reversed(list(_inner_part(thread))):
        path = frame.file
        for package in _NETWORK:
            if f"/{package}" in path:
                return package.rstrip("/")
    for frame in _inner_part(thread):
        if any(frame.file.endswith("/" + name) for name in _NETWORK_STDLIB):
            return PurePosixPath(frame.file).stem
    return None


def writes_file(thread: ThreadStack) -> bool:
    frame = thread.user_frame
    inner = list(_inner_part(thread))
    if any(f.function in {"save", "_save", "_open_zipfile_writer", "save_file"} for f in inner):
        return True
    return frame is not None and bool(_WRITE_TEXT.search(source_text(frame)))


def reads_input(thread: ThreadStack) -> bool:
    frame = thread.user_frame
    return frame is not None and bool(_INPUT_TEXT.search(source_text(frame)))


def fetching_at(stack: Sequence[Frame]) -> Frame | None:
    """The user's line that a loader worker runs. Frames outside its work come from the rank that forked it."""
    loop = next((i for i, frame in enumerate(stack) if frame.function.endswith("_worker_loop")), len(stack))
    return innermost_user(stack[:loop])


def compiles(thread: ThreadStack) -> bool:
    """Whether a compiler below the user's line is working, or waiting for processes it started."""
    inner = [frame.file for frame in _inner_part(thread)]
    # Waiting for a lock file left by a killed build never ends.
    return any(map(_COMPILER.search, inner)) and not any(path.endswith("/file_baton.py") for path in inner)


def in_loader(thread: ThreadStack) -> bool:
    return any("torch/utils/data/" in frame.file for frame in thread.frames)
