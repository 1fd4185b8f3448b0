"""What an exception is about, from its type, text and frames: the code it deserves and the title of the finding."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from model_check.diagnose.evidence import Evidence
from model_check.record.error_texts import (
    DEVICE_ASSERT,
    DEVICE_LOST,
    DEVICE_OOM,
    HOST_OOM,
    NO_ROOM,
    PORT_TAKEN,
    is_dead_worker,
)
from model_check.record.events.crashes import ExceptionEvent
from model_check.record.events.process import PortHeld

_NO_GPU = re.compile(
    r"invalid device ordinal|no CUDA GPUs are available|devices? (is|are) busy or unavailable|Duplicate GPU detected|"
    r"no CUDA-capable device|Found no NVIDIA driver|Torch not compiled with CUDA|"
    r"has no attribute '_cuda_",  # a torch without CUDA that is asked for a device
    re.I,
)
# torch.save finds a failed write by the position it did not reach, and says no more than that.
_SHORT_WRITE = re.compile(r"inline_container\.cc.{0,60}unexpected pos")
_TORN = re.compile(
    r"PytorchStreamReader|central directory|unexpected (EOF|end)|not a zip|truncated|pickle data was truncated|"
    r"invalid load key|HeaderTooLarge|MetadataIncompleteBuffer|InvalidHeader|Expecting value|Unterminated string|"
    r"Extra data|Parquet magic bytes|file is too small|Ran out of input|\[Errno 22\] Invalid argument",
    re.I,
)
_TORN_TYPES = frozenset(
    {"EOFError", "UnpicklingError", "JSONDecodeError", "SafetensorError", "ArrowInvalid", "BadZipFile"}
)
# The file is intact, but holds something that torch.load does not allow.
_REFUSED = re.compile(r"Unsupported (global|class|operand)|weights_only.{0,40}TorchScript", re.I)
_CHECKPOINT_FILES = ("torch/serialization.py", "safetensors/", "torch/distributed/checkpoint/")
_CHECKPOINT_TEXT = re.compile(r"\b(torch|pickle|joblib|np|numpy)\.load\(|\bload_file\(|\bsafe_open\(")
_MAKES_DIRECTORY = re.compile(r"\bmkdir\(|\bmakedirs\(|\.mkdir\(|\brmtree\(|\bsymlink|\brename\(|\breplace\(")
_READS = re.compile(r"load|read|open|from_file|decode|restore|from_pretrained", re.I)

# Code, title, names of exception classes, and what their text says; the first that fits counts.
_SUBJECTS: tuple[tuple[str, str, tuple[str, ...], re.Pattern[str] | None], ...] = (
    ("MC310", "{who} cannot import: {text}", ("ImportError", "ModuleNotFoundError"), None),
    ("MC501", "{who} ran out of device memory", ("OutOfMemoryError",), DEVICE_OOM),
    ("MC311", "an assertion failed on the device of {who}", (), DEVICE_ASSERT),
    ("MC312", "the device of {who} failed", (), DEVICE_LOST),
    ("MC104", "{who} has no usable GPU: {text}", (), _NO_GPU),
    ("MC307", "{who} ran out of host memory", ("MemoryError",), HOST_OOM),
    ("MC604", "{who} could not write: the disk, a quota or a limit on file sizes leaves no room", (), NO_ROOM),
    ("MC604", "{who} could not write a file to its end: most likely its disk has no room", (), _SHORT_WRITE),
)


def classify_exception(error: ExceptionEvent, evidence: Evidence, ranks: Iterable[int]) -> tuple[str, str]:
    """The code, and the title with `{who}` for the ranks; an empty title means: quote the exception."""
    kind = (error.root_type or error.type).rpartition(".")[2]
    text = f"{error.message} {error.root_message or ''}"
    if error.own_code.startswith("MC6"):
        return error.own_code, ""
    if PORT_TAKEN.search(text):
        return "MC103", _port_title(evidence)
    if is_dead_worker(error):
        return "MC216", "a loader worker of {who} died"
    for code, title, kinds, pattern in _SUBJECTS:
        if kind in kinds or (pattern is not None and pattern.search(text)):
            return code, title.replace("{text}", _short(text))
    some_only = len(set(ranks)) < max(1, evidence.world_size)
    if some_only and kind == "FileExistsError" and _touches_directory(error):
        return "MC107", f"{{who}} lost a race for a directory: {_short(text)}"
    torn = (kind in _TORN_TYPES or _TORN.search(text)) and not _REFUSED.search(text)
    if torn and _reads_checkpoint(error) and (not some_only or _nobody_writes(evidence, ranks)):
        return "MC601", "{who} read a file that is damaged or cut off"
    if some_only and torn and _reads_file(error):
        return "MC110", "{who} read a file that another rank was still writing"
    return "MC301", ""


def port_facts(evidence: Evidence) -> dict[str, Any]:
    return {name: value for held in evidence.said(PortHeld) for name, value in held.body().items()}


def _port_title(evidence: Evidence) -> str:
    holders = evidence.said(PortHeld)
    if not holders:
        return "the port {who} wants to listen on is taken"
    held = holders[-1]
    by = f" by process {held.holder_pid} ({held.holder_cmd or '?'})" if held.holder_pid else ""
    return f"port {held.port}, which {{who}} needs, is taken{by}"


def _short(text: str) -> str:
    return text.strip().split("\n")[0][:120]


def _touches_directory(error: ExceptionEvent) -> bool:
    frames = error.frames_told
    if any(f.function in ("mkdir", "makedirs", "rmtree", "rename", "replace", "symlink_to") for f in frames):
        return True
    return any(_MAKES_DIRECTORY.search(f.text) for f in frames) or not any(f.text for f in frames)


def _reads_checkpoint(error: ExceptionEvent) -> bool:
    """Whether it was raised while loading with torch, safetensors, pickle or numpy."""
    return any(
        any(part in frame.file for part in _CHECKPOINT_FILES) or _CHECKPOINT_TEXT.search(frame.text)
        for frame in error.frames_told
    )


def _nobody_writes(evidence: Evidence, ranks: Iterable[int]) -> bool:
    """Every other rank waits for its peers or has failed too, so none can be writing a file."""
    others = [evidence.of(rank) for rank in evidence.all_ranks if rank not in set(ranks)]
    return all(rank.blocking is not None or rank.exceptions for rank in others)


def _reads_file(error: ExceptionEvent) -> bool:
    return any(_READS.search(f"{frame.function} {frame.text}") for frame in error.frames_told)
