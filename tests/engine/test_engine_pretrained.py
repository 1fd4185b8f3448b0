"""Training that starts from a plain file of weights: whoever wrote it, under every layout, or a sentence why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model_check import load_config
from model_check.config import Config
from model_check.engine.arrangement import arrange_llama
from model_check.engine.place import Place
from model_check.errors import CheckpointError, ConfigError
from model_check.models import Llama, hugging_face_name
from tests.models.test_models_parallelize import on_ranks

SIZES = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.intermediate_size=64",
    "model.vocab_size=64",
)


def config(path: Path | None, *overrides: str, sizes: tuple[str, ...] = SIZES) -> Config:
    named = (f"model.model_path={path}", "model.init=pretrained") if path else ("model.model_path=null",)
    return load_config(overrides=[*sizes, *named, "training.precision=fp32", *overrides])


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    model = arrange_llama(config(None, "system.seed=99"), Place(), 64).bare_model
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def theirs(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {hugging_face_name(name): tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("plain.pt", lambda state: state),
        ("replica.pth", lambda state: {f"module._orig_mod.{name}": t for name, t in state.items()}),
        ("trainer.pt", lambda state: {"step": 7, "model_state_dict": state}),
        ("hub.bin", theirs),
        ("hub.safetensors", theirs),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_of_weights_fills_the_model(
    tmp_path: Path, state: dict[str, torch.Tensor], name: str, form: Any
) -> None:
    path = tmp_path / name
    (save_file if path.suffix == ".safetensors" else torch.save)(form(state), path)
    found = arrange_llama(config(path), Place(), 64).bare_model.state_dict()
    assert found.keys() == state.keys()
    assert [name for name, tensor in state.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("keys", [("parallel.strategy=fsdp",), ("parallel.tensor=2",), ("parallel.pipeline=2",)])
def test_every_rank_takes_its_part(tmp_path: Path, state: dict[str, torch.Tensor], keys: tuple[str, ...]) -> None:
    path = tmp_path / "weights.pt"
    torch.save(state, path)

    def work(rank: int) -> dict[str, torch.Tensor]:
        model = arrange_llama(config(path, *keys), Place(rank, 2), 64).bare_model
        whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}
        return {name: tensor.numpy() for name, tensor in whole.items()}

    held: set[str] = set()
    for found in on_ranks(2, work):
        held |= found.keys()
        assert [name for name, values in found.items() if not torch.equal(torch.from_numpy(values), state[name])] == []
    assert held == state.keys()


def test_other_shapes_are_named_with_both_sizes(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "weights.pt"
    torch.save(state, path)
    wider = tuple(size.replace("intermediate_size=64", "intermediate_size=96") for size in SIZES)
    with pytest.raises(CheckpointError) as caught:
        arrange_llama(config(path, sizes=wider), Place(), 64)
    assert caught.value.code == "MC607"
    assert "model.layers.0.feed_forward.w1.weight is [64, 32] there and [96, 32] here" in caught.value.message
    assert caught.value.remedy is not None and "set model.model_path to another file" in caught.value.remedy


def test_a_file_that_is_no_weights_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"model": Llama}, path)
    with pytest.raises(CheckpointError, match="cannot be read as plain tensors") as caught:
        arrange_llama(config(path), Place(), 64)
    assert caught.value.code == "MC601"


@pytest.mark.parametrize(
    ("overrides", "code", "sentence"),
    [
        (("model.num_layers=null",), "MC823", "a file of weights, which says no sizes, and model.num_layers is null"),
        (("model.init=random",), "MC824", "is a file of weights, and model.init=random takes none"),
    ],
)
def test_a_file_does_not_say_what_the_model_is(
    tmp_path: Path, overrides: tuple[str, ...], code: str, sentence: str
) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(b"not looked into")
    with pytest.raises(ConfigError) as caught:
        config(path, *overrides)
    assert [problem.code for problem in caught.value.problems] == [code]
    assert sentence in caught.value.problems[0].message


def test_a_file_that_is_not_there_is_no_shape(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a built-in shape nor a folder"):
        config(tmp_path / "absent.pt")
