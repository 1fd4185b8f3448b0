"""How the weights of a Hugging Face folder are cut into files, and the index that says which file has which tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 1024**3


def is_weights_folder(folder: Path) -> bool:
    """Whether a folder holds the weights of a model as Hugging Face keeps them."""
    return (folder / INDEX_FILE).exists() or (folder / SINGLE_FILE).exists()


def cut_into_files(sizes: Mapping[str, int], most: int = SHARD_BYTES) -> dict[str, list[str]]:
    """File name to tensor names, in order, cut before a file would pass `most` bytes; a larger tensor has its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": names for number, names in enumerate(shards, start=1)
    }


def index_of(files: Mapping[str, list[str]], sizes: Mapping[str, int]) -> dict[str, Any] | None:
    """What INDEX_FILE holds; None where one file has everything, for then there is none."""
    if len(files) == 1:
        return None
    return {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }


def tensors_in_index(text: str) -> dict[str, list[str]]:
    """Each file that an index names, with its tensors. ValueError if it is not an index or names another folder."""
    files: dict[str, list[str]] = {}
    try:
        for tensor, name in json.loads(text)["weight_map"].items():
            files.setdefault(name, []).append(tensor)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("it is not an index of safetensors") from error
    for name in files:
        if not isinstance(name, str) or PurePath(name).name != name:
            raise ValueError(f"it points outside its folder ({name})")
    return {name: files[name] for name in sorted(files)}


def files_in_index(text: str) -> list[str]:
    """The files an index names; ValueError as above."""
    return list(tensors_in_index(text))
