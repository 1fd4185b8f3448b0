"""Where a pretrained model lives: a local folder, or a hub id that is fetched once into the hub's own cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from model_check.config.endpoint import answers
from model_check.errors import HubUnavailable, ModelError

CONFIG_FILE = "config.json"
_NEEDED = [CONFIG_FILE, "*.safetensors", "*.safetensors.index.json", "tokenizer.json"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def pretrained_folder(source: str | Path) -> Path:
    """The local folder of `source`."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG_FILE).is_file():
            raise ModelError(
                f"{folder} has no {CONFIG_FILE}",
                remedy="name a Hugging Face model folder, or convert the weights",
            )
        return folder
    if not _HUB_ID.fullmatch(str(source)) or str(source).startswith("."):
        raise ModelError(
            f"there is no model folder {source}", remedy="check the path, or pass a hub id like owner/name"
        )
    return _fetch(str(source))


def _fetch(hub_id: str) -> Path:
    # The hub's client takes a noticeable part of a second to import, and most runs read a local folder.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    offline = constants.HF_HUB_OFFLINE or not answers(constants.ENDPOINT)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_NEEDED, local_files_only=offline))
    except LocalEntryNotFoundError as error:
        raise HubUnavailable(
            f"{hub_id} is neither a folder nor in the local hub cache, and {constants.ENDPOINT} cannot be reached",
            remedy="fetch it where there is a network and pass its folder, or train from scratch: model.init=random",
        ) from error
    except GatedRepoError as error:
        raise HubUnavailable(
            f"{hub_id} is gated, and HF_TOKEN {'does not open it' if os.environ.get('HF_TOKEN') else 'is not set'}",
            remedy="accept its licence on the hub and export HF_TOKEN with read permission",
        ) from error
    except RepositoryNotFoundError as error:
        raise HubUnavailable(
            f"the hub has no model {hub_id} that we may see", remedy="check the name, and HF_TOKEN if it is private"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise HubUnavailable(
            f"{hub_id} could not be fetched from {constants.ENDPOINT}: {type(error).__name__}",
            remedy="try again, or pass a local folder",
        ) from error
