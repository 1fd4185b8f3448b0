"""How the weights of a Hugging Face folder are cut into files, and the index that says which file has which tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 1024**3


def is_weights_folder(folder: Path) -> bool:
    """Whether a folder holds the weights of a model as Hugging Face keeps them."""
    return (folder / INDEX_FILE).exists() or (folder / SINGLE_FILE).exists()


def cut_into_files(sizes: Mapping[str, int], most: int = SHARD_BYTES) -> StateDictSplit:
    """Which tensors go into which file, none of more than `most` bytes; a larger tensor has one of its own."""
    from huggingface_hub import split_state_dict_into_shards_factory

    return split_state_dict_into_shards_factory(
        dict(sizes), get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=most
    )


def index_of(files: StateDictSplit) -> dict[str, Any] | None:
    """What INDEX_FILE holds; None where one file has everything, for then there is none."""
    return {"metadata": files.metadata, "weight_map": files.tensor_to_filename} if files.is_sharded else None


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
