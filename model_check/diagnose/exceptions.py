"""What an exception is about, from its type, text and frames: the code it deserves and the title of the finding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from model_check.diagnose.evidence import Evidence
from model_check.record.error_texts import (
    DEVICE_ASSERT,
    DEVICE_LOST,
    DEVICE_OOM,
    HOST_OOM,
    NO_ROOM,
    PORT_TAKEN,
    frames_told,
    is_dead_worker,
)
from model_check.record.events.process import PortHeld

# An error of our own that says its code itself.
_NAMED = re.compile(r"\[(MC6(?:0[1-9]|10))\] ")
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


def classify_exception(
    exception: Mapping[str, Any], *, evidence: Evidence | None = None, ranks: Iterable[int] = ()
) -> tuple[str, str]:
    """The code, and the title with `{who}` for the ranks; an empty title means: quote the exception."""
    kind = str(exception.get("root_type") or exception.get("type") or "").rpartition(".")[2]
    text = f"{exception.get('message') or ''} {exception.get('root_message') or ''}"
    if named := _NAMED.match(text):
        return named[1], ""
    if PORT_TAKEN.search(text):
        return "MC103", _port_title(evidence)
    if is_dead_worker(exception):
        return "MC216", "a loader worker of {who} died"
    if kind in ("ImportError", "ModuleNotFoundError"):
        return "MC310", f"{{who}} cannot import: {_short(text)}"
    if kind == "OutOfMemoryError" or DEVICE_OOM.search(text):
        return "MC501", "{who} ran out of device memory"
    if DEVICE_ASSERT.search(text):
        return "MC311", "an assertion failed on the device of {who}"
    if DEVICE_LOST.search(text):
        return "MC312", "the device of {who} failed"
    if _NO_GPU.search(text):
        return "MC104", f"{{who}} has no usable GPU: {_short(text)}"
    if kind == "MemoryError" or HOST_OOM.search(text):
        return "MC307", "{who} ran out of host memory"
    if NO_ROOM.search(text):
        return "MC604", "{who} could not write: the disk, a quota or a limit on file sizes leaves no room"
    if _SHORT_WRITE.search(text):
        return "MC604", "{who} could not write a file to its end: most likely its disk has no room"
    some_only = evidence is None or len(set(ranks)) < max(1, evidence.world_size)
    if some_only and kind == "FileExistsError" and _touches_directory(exception):
        return "MC107", f"{{who}} lost a race for a directory: {_short(text)}"
    torn = (kind in _TORN_TYPES or _TORN.search(text)) and not _REFUSED.search(text)
    if torn and _reads_checkpoint(exception) and (not some_only or _nobody_writes(evidence, ranks)):
        return "MC601", "{who} read a file that is damaged or cut off"
    if some_only and torn and _reads_file(exception):
        return "MC110", "{who} read a file that another rank was still writing"
    return "MC301", ""


def _port_title(evidence: Evidence | None) -> str:
    holders = evidence.said(PortHeld) if evidence is not None else []
    if not holders:
        return "the port {who} wants to listen on is taken"
    held = holders[-1]
    by = f" by process {held.holder_pid} ({held.holder_cmd or '?'})" if held.holder_pid else ""
    return f"port {held.port}, which {{who}} needs, is taken{by}"


def _short(text: str) -> str:
    return text.strip().split("\n")[0][:120]


def _touches_directory(exception: Mapping[str, Any]) -> bool:
    frames = frames_told(exception)
    if any(f.get("function") in ("mkdir", "makedirs", "rmtree", "rename", "replace", "symlink_to") for f in frames):
        return True
    texts = [str(f.get("text") or "") for f in frames]
    return any(_MAKES_DIRECTORY.search(text) for text in texts) or not any(texts)


def _reads_checkpoint(exception: Mapping[str, Any]) -> bool:
    """Whether it was raised while loading with torch, safetensors, pickle or numpy."""
    return any(
        any(part in str(frame.get("file") or "") for part in _CHECKPOINT_FILES)
        or _CHECKPOINT_TEXT.search(str(frame.get("text") or ""))
        for frame in frames_told(exception)
    )


def _nobody_writes(evidence: Evidence | None, ranks: Iterable[int]) -> bool:
    """Every other rank waits for its peers or has failed too, so none can be writing a file."""
    if evidence is None:
        return False
    others = [evidence.of(rank) for rank in evidence.all_ranks if rank not in set(ranks)]
    return all(rank.blocking is not None or rank.exceptions for rank in others)


def _reads_file(exception: Mapping[str, Any]) -> bool:
    names = ("load", "read", "open", "from_file", "decode", "loads", "restore", "from_pretrained")
    for frame in frames_told(exception):
        called = f"{frame.get('function') or ''} {frame.get('text') or ''}".lower()
        if any(name in called for name in names):
            return True
    return False
