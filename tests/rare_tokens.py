"""Training data whose every document ends in a character of its own, and weights that cannot stand some of them.

So one global batch, and of it one rank's share, can be made bad by itself.
"""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from typing import Any

import torch

from model_check.config import load_config, resolve_shape
from model_check.data import BatchLoader, load_tokenizer, prepare
from model_check.engine.data_and_shape import data_spec
from model_check.models import build_model
from tests.conftest import Shell

# Of each of these characters there is one in all the data, so that one global batch can be made bad by itself.
RARE = string.ascii_uppercase + string.digits + string.punctuation
DOCUMENTS = [("abcdefghij" * 6)[n % 10 :] + rare for n, rare in enumerate(RARE)]
SETTINGS = (
    "training.context_length=64",
    "training.batch_size=2",
    "training.learning_rate=1e-3",
    "data.dataset=documents.jsonl",
    "data.tokenizer=bytes",
    "data.samples=null",
    "checkpoint.interval=2",
    "debug.nan=false",
)


def poisoned(shell: Shell, *batches: int, ranks: int = 1, guilty: int = 0) -> Path:
    """Weights that cannot stand one token in the guilty rank's share of each of these global batches."""
    lines = [json.dumps({"text": document}) + "\n" for document in DOCUMENTS]
    (shell.folder / "documents.jsonl").write_text("".join(lines))
    here = {"data.dataset": "documents.jsonl", "data.cache_dir": ".cache/datasets"}
    config = load_config(
        preset="debug", overrides=[*SETTINGS, *(f"{key}={shell.folder / name}" for key, name in here.items())]
    )
    tokens = _tokens(config, ranks)
    model = build_model(resolve_shape(config.model, load_tokenizer("bytes").vocab_size), seed=1)
    state = model.state_dict()
    for number in batches:
        elsewhere = set().union(*(seen for key, seen in tokens.items() if key != (number, guilty)))
        state["tok_embed.weight"][min(tokens[number, guilty] - elsewhere)] = math.nan
    weights = shell.folder / "weights.pt"
    torch.save(state, weights)
    return weights


def _tokens(config: Any, ranks: int) -> dict[tuple[int, int], set[int]]:
    """The tokens that each rank is given in each of the first global batches."""
    cache = prepare(data_spec(config)).train
    seen = {}
    for rank in range(ranks):
        loader = BatchLoader(
            cache,
            batch_size=config.training.batch_size,
            context_length=config.training.context_length,
            rank=rank,
            world_size=ranks,
            seed=config.system.seed,
        )
        with loader:
            seen |= {(number, rank): set(next(loader).tokens.flatten().tolist()) for number in range(14)}
    return seen
