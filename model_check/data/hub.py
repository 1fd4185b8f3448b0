"""The Hugging Face hub: tokenizer files and datasets, or a clear answer within a second.

One that cannot be reached or says nothing is given up soon (config.endpoint): then the local copy is used, and where
there is none the error says what to do. The token comes from HF_TOKEN and is handed to the libraries only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model_check.config.endpoint import ANSWER_SECONDS, PROBE_SECONDS, reachable, silent
from model_check.errors import DataError, HubUnavailable

ALIASES = {"wikitext": ("Salesforce/wikitext", "wikitext-103-raw-v1"), "c4": ("allenai/c4", "en")}
"""Short names of the earlier guides -> hub id and the subset taken when none is named."""
LARGE = frozenset({"allenai/c4"})
"""Never downloaded whole."""


def dataset_name(name: str, subset: str | None) -> tuple[str, str | None]:
    """The hub id and subset behind a short name."""
    repo_id, default_subset = ALIASES.get(name, (name, None))
    return repo_id, subset if subset is not None else default_subset


def _no_answer(what: str, kind: str) -> HubUnavailable | None:
    """Why only what is on this machine can be used; None where the hub answers."""
    from huggingface_hub import constants

    here = "data.tokenizer=builtin" if kind == "tokenizer" else "data.dataset=synthetic or a local file"
    if constants.HF_HUB_OFFLINE:
        return HubUnavailable(
            f"{kind} {what!r} is not on this machine and HF_HUB_OFFLINE forbids to fetch it",
            remedy=f"unset HF_HUB_OFFLINE, or use {here}",
            code="MC905",
        )
    if not reachable(constants.ENDPOINT):
        waited = PROBE_SECONDS
    elif silent(constants.ENDPOINT, ANSWER_SECONDS):
        waited = ANSWER_SECONDS
    else:
        return None
    return HubUnavailable(
        f"{kind} {what!r} is not on this machine and {constants.ENDPOINT} does not answer within {waited:g} s",
        remedy=f"connect this machine (HTTPS_PROXY, HF_ENDPOINT), copy the files here, or use {here}",
        code="MC905",
    )


def _explain(error: Exception, what: str, kind: str) -> DataError:
    """The hub's refusals, one sentence each. Never includes a header, so never a token."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    unusable = "MC907" if kind == "tokenizer" else "MC906"
    if isinstance(error, errors.GatedRepoError) or status in (401, 403):
        given = "the HF_TOKEN in the environment" if os.environ.get("HF_TOKEN") else "no HF_TOKEN"
        return HubUnavailable(
            f"the hub refuses {kind} {what!r} (HTTP {status}) with {given}",
            remedy="accept its terms on its hub page, then export HF_TOKEN with a token that may read it",
            code="MC905",
        )
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return DataError(
            f"there is no {kind} {what!r} on the hub",
            remedy="check the name; a local path must exist or begin with './'",
            code=unusable,
        )
    if status is not None:
        return HubUnavailable(
            f"the hub answered HTTP {status} for {kind} {what!r}", remedy="try again later", code="MC905"
        )
    if isinstance(error, (ConnectionError, errors.LocalEntryNotFoundError)) or type(error).__module__.startswith(
        "http"
    ):
        return HubUnavailable(
            f"the connection to the hub broke while fetching {kind} {what!r} ({type(error).__name__})",
            remedy="try again; what has arrived is kept",
            code="MC905",
        )
    first_line = next(iter(str(error).splitlines()), "")
    return DataError(
        f"{kind} {what!r} cannot be used: {type(error).__name__}: {first_line}",
        remedy="check its name, subset and split",
        code=unusable,
    )


def download(repo_id: str, filename: str, *, required: bool = True) -> Path | None:
    """A file of a model repository: the local copy where there is one, else from the hub. None: it has no such file."""
    import huggingface_hub
    from huggingface_hub import errors, utils

    try:
        local = huggingface_hub.try_to_load_from_cache(repo_id, filename)
    except errors.HFValidationError as error:
        raise _explain(error, repo_id, "tokenizer") from error
    if isinstance(local, str):
        return Path(local)
    unavailable = _no_answer(repo_id, "tokenizer")
    if unavailable is not None:
        if not required:
            return None
        raise unavailable
    utils.disable_progress_bars()
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                repo_id, filename, token=os.environ.get("HF_TOKEN"), etag_timeout=ANSWER_SECONDS
            )
        )
    except errors.EntryNotFoundError:
        return None
    except Exception as error:  # every library below (httpx, hub, OS) has its own tree: each becomes a named error
        raise _explain(error, repo_id, "tokenizer") from error


def open_dataset(name: str, subset: str | None, split: str, *, streaming: bool) -> Any:
    """A `datasets.Dataset`, or `IterableDataset` when streaming. Checks the name with one request before loading."""
    import datasets
    import huggingface_hub
    from huggingface_hub import utils

    repo_id, subset = dataset_name(name, subset)
    utils.disable_progress_bars()
    datasets.disable_progress_bars()
    token = os.environ.get("HF_TOKEN")
    unavailable = _no_answer(name, "dataset")
    if unavailable is not None:
        try:
            with _libraries_offline():
                return datasets.load_dataset(repo_id, subset, split=split)
        except Exception as error:  # whatever the reason, there is no usable local copy
            raise unavailable from error
    try:
        huggingface_hub.HfApi().dataset_info(repo_id, timeout=ANSWER_SECONDS, token=token)
        return datasets.load_dataset(repo_id, subset, split=split, streaming=streaming, token=token)
    except Exception as error:  # see download
        raise _explain(error, name, "dataset") from error


@contextmanager
def _libraries_offline() -> Iterator[None]:
    """Both libraries read HF_HUB_OFFLINE once, at import; this is the only way to say it later."""
    import datasets.config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def stream_rows(rows: Any, name: str) -> Iterator[dict[str, Any]]:
    """The rows of a streamed dataset; a connection that breaks on the way becomes an error with a name."""
    try:
        yield from rows
    except Exception as error:  # see download
        raise _explain(error, name, "dataset") from error
