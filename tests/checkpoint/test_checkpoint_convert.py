"""Weights change their form and nothing else; old files load; and none of it needs the model in memory."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from model_check.checkpoint import weight_writers
from model_check.checkpoint.weight_files import StoredTensor, clean_names, open_weights
from model_check.cli.checkpoint import convert, inspect, verify
from model_check.config.shapes import ModelShape
from model_check.engine import resume
from model_check.errors import CheckpointError, UsageError
from model_check.models import Llama, build_model
from tests.signals import hear_signals

SHAPE = ModelShape(
    num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24, vocab_size=64
)


@pytest.fixture
def model() -> Llama:
    return build_model(SHAPE, torch.device("cpu"), torch.float32, seed=7)


def equal(weights: dict[str, StoredTensor], model: nn.Module) -> bool:
    state = model.state_dict()
    return weights.keys() == state.keys() and all(torch.equal(weights[n].read(), state[n]) for n in state)


def test_a_round_trip_through_every_form_keeps_every_bit(model: Llama, tmp_path: Path) -> None:
    torch.save({"step": 12, "shape": asdict(SHAPE), "model": model.state_dict()}, tmp_path / "old.pt")
    chain = ["old.pt", "a.safetensors", "sharded", "hf", "b.pt", "hf2", "c.safetensors"]
    for source, target in itertools.pairwise(chain):
        convert(tmp_path / source, tmp_path / target, to="sharded" if target == "sharded" else None)
    assert equal(open_weights(tmp_path / "c.safetensors").tensors, model)
    assert equal(open_weights(tmp_path / "b.pt").tensors, model)
    whole = torch.load(tmp_path / "b.pt", weights_only=True)
    assert all(torch.equal(whole["model"][name], value) for name, value in model.state_dict().items())
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (tmp_path / "hf2" / "model.safetensors").read_bytes()


def test_the_hugging_face_folder_is_what_transformers_computes_with(model: Llama, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    torch.save({"shape": asdict(SHAPE), "model": model.state_dict()}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "hf")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = torch.arange(10).reshape(1, 10)
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, model(tokens), atol=1e-5)


@pytest.mark.parametrize("nest", [None, "model", "state_dict", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_old_files_load_with_any_prefix_and_nest(model: Llama, tmp_path: Path, nest: str | None, prefix: str) -> None:
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save(state if nest is None else {nest: state, "epoch": 3}, tmp_path / "old.pt")
    weights = open_weights(tmp_path / "old.pt")
    other = build_model(SHAPE, torch.device("cpu"), torch.float32, seed=8)
    resume.load_weights(other, weights, resume.model_shapes(other))
    assert equal(weights.tensors, other) and equal(weights.tensors, model)
    assert "".join(sorted(weights.removed_prefixes)) == "".join(sorted(p + "." for p in prefix.split(".") if p))


def test_a_compiled_block_inside_the_name_is_found_too() -> None:
    assert clean_names(["layers.0._orig_mod.wq.weight"]) == {"layers.0._orig_mod.wq.weight": "layers.0.wq.weight"}
    # Not every name carries it: then it is a part of the model.
    assert clean_names(["module.a", "b"]) == {"module.a": "module.a", "b": "b"}


def test_hugging_face_names_in_a_pt_file_load(model: Llama, tmp_path: Path) -> None:
    from model_check.models import hugging_face_name

    torch.save({hugging_face_name(n): v for n, v in model.state_dict().items()}, tmp_path / "theirs.pt")
    other = build_model(SHAPE, torch.device("cpu"), torch.float32, seed=8)
    resume.load_weights(other, open_weights(tmp_path / "theirs.pt"), resume.model_shapes(other))
    assert torch.equal(other.layers[1].attention.wq.weight, model.layers[1].attention.wq.weight)


def test_views_and_shared_storage_read_as_they_were(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    torch.save({"whole": base, "turned": base.t(), "row": base[2], "half": base[:, 3:]}, tmp_path / "views.pt")
    read = {name: tensor.read() for name, tensor in open_weights(tmp_path / "views.pt").tensors.items()}
    assert torch.equal(read["turned"], base.t()) and torch.equal(read["row"], base[2])
    assert torch.equal(read["half"], base[:, 3:]) and torch.equal(read["whole"], base)


def test_the_format_before_zip_files_is_read_too(model: Llama, tmp_path: Path) -> None:
    torch.save(model.state_dict(), tmp_path / "ancient.pt", _use_new_zipfile_serialization=False)
    assert equal(open_weights(tmp_path / "ancient.pt").tensors, model)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("open('exploded', 'w').close()",))


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_pickle_that_does_things_is_refused_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if how == "torch":
        torch.save({"model": {"w": torch.ones(2)}, "extra": Bomb()}, "bomb.pt")
    else:
        Path("bomb.pt").write_bytes(pickle.dumps({"w": Bomb()}))
    with pytest.raises(CheckpointError, match="cannot be read as plain tensors") as caught:
        open_weights(Path("bomb.pt"))
    assert caught.value.code == "MC601" and not Path("exploded").exists()
    if how == "torch":
        assert re.search(r"it holds \S*exec$", caught.value.message)


def test_weights_of_another_shape_are_named(model: Llama, tmp_path: Path) -> None:
    state = dict(model.state_dict())
    state["tok_embed.weight"] = torch.zeros(64, 8)
    del state["norm.weight"]
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(CheckpointError) as caught:
        resume.load_weights(model, open_weights(tmp_path / "other.pt"), resume.model_shapes(model))
    assert caught.value.code == "MC607"
    assert "model.tok_embed.weight is [64, 8] there and [64, 16] here" in caught.value.message
    assert "model.norm.weight is not there" in caught.value.message


def test_inspect_says_what_is_there(model: Llama, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {f"module.{n}": v for n, v in model.state_dict().items()}}, tmp_path / "x.pt")
    inspect(tmp_path / "x.pt", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "pt" and told["prefixes"] == ["module."]
    assert told["tensors"]["layers.0.attention.wk.weight"] == {"dtype": "float32", "shape": [8, 16], "bytes": 512}
    assert told["model_bytes"] == sum(p.nbytes for p in model.parameters())


def test_what_cannot_be_converted_is_a_sentence(model: Llama, tmp_path: Path) -> None:
    torch.save(model.state_dict(), tmp_path / "x.pt")
    with pytest.raises(UsageError, match="does not say the shape"):
        convert(tmp_path / "x.pt", tmp_path / "hf")
    with pytest.raises(UsageError, match="--to onnx is not a form we write"):
        convert(tmp_path / "x.pt", tmp_path / "y", to="onnx")
    (tmp_path / "taken.pt").write_text("precious")
    with pytest.raises(CheckpointError, match="exists"):
        convert(tmp_path / "x.pt", tmp_path / "taken.pt")
    assert (tmp_path / "taken.pt").read_text() == "precious"
    with pytest.raises(UsageError, match="there is no"):
        convert(tmp_path / "gone.pt", tmp_path / "y.pt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["taken.pt", "x.pt"]


def test_a_config_that_is_not_of_these_weights_is_refused(model: Llama, tmp_path: Path) -> None:
    """transformers would load such a folder and compute gibberish."""
    shape = {**asdict(SHAPE), "num_heads": 4, "head_dim": 4}
    cases = {
        "deeper": ({**asdict(SHAPE), "num_layers": 3}, "model.layers.2.attention_norm.weight is not there"),
        "wider": ({**asdict(SHAPE), "vocab_size": 65}, "model.tok_embed.weight is [64, 16] there and [65, 16] here"),
        "fewer": ({**asdict(SHAPE), "num_layers": 1}, "model.layers.1.attention_norm.weight is there alone"),
        "keys": ({**shape, "num_kv_heads": 4}, "model.layers.0.attention.wk.weight is [8, 16] there and [16, 16] here"),
        "odd": ({"layers": 2}, "says a shape that is none"),
    }
    for name, (said, words) in cases.items():
        torch.save({"shape": said, "model": model.state_dict()}, tmp_path / f"{name}.pt")
        with pytest.raises(CheckpointError) as caught:
            convert(tmp_path / f"{name}.pt", tmp_path / name)
        assert caught.value.code == "MC607" and words in caught.value.message and "--like" in caught.value.remedy
        assert not (tmp_path / name).exists()
    torch.save({"shape": asdict(SHAPE), "model": model.state_dict()}, tmp_path / "right.pt")
    with pytest.raises(CheckpointError, match="is of another model"):
        convert(tmp_path / "right.pt", tmp_path / "like", like="llama-3.2-1b")


STRANGE = {
    "sparse": torch.eye(3).to_sparse(),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_tensor_whose_bytes_are_not_its_values_is_refused(tmp_path: Path, kind: str, zipped: bool) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(2), "odd": STRANGE[kind]}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"odd in .* is .*, and only dense tensors are read"):
        open_weights(path)


@pytest.mark.parametrize("names", [("_orig_mod.a.w", "a.w"), ("module.a", "module._orig_mod.a"), (0, "0")])
def test_two_tensors_that_would_become_one_are_refused(tmp_path: Path, names: tuple[object, object]) -> None:
    torch.save({names[0]: torch.ones(2), names[1]: torch.zeros(2)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"which are both|names two tensors alike"):
        open_weights(tmp_path / "x.pt")


def test_a_name_that_safetensors_keeps_for_itself_is_refused(tmp_path: Path) -> None:
    torch.save({"__metadata__": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="keeps the name __metadata__ for itself"):
        convert(tmp_path / "x.pt", tmp_path / "x.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]


@pytest.mark.parametrize("suffix", ["pt", "safetensors", "folder"])
def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path, model: Llama, suffix: str) -> None:
    torch.save({"shape": asdict(SHAPE), "model": model.state_dict()}, tmp_path / "x.pt")
    for place in (Path("/proc"), tmp_path / "x.pt"):
        target = place / f"y.{suffix}"
        with pytest.raises(CheckpointError, match=f"{target} cannot be written") as caught:
            convert(tmp_path / "x.pt", target)
        assert caught.value.code == "MC608"


@pytest.mark.parametrize("suffix", ["pt", "pth", "ckpt", "bin"])
def test_the_usual_suffixes_of_torch_give_a_file(tmp_path: Path, suffix: str) -> None:
    torch.save({"w": torch.arange(3)}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / f"y.{suffix}")
    assert torch.load(tmp_path / f"y.{suffix}", weights_only=True)["model"]["w"].tolist() == [0, 1, 2]


def test_verify_calls_nothing_damaged_that_was_never_ours(tmp_path: Path, model: Llama) -> None:
    torch.save({"shape": asdict(SHAPE), "model": model.state_dict()}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "hf")
    for path in (tmp_path / "x.pt", tmp_path / "hf", tmp_path):
        with pytest.raises(UsageError, match="is no checkpoint of ours and holds none"):
            verify(path)
    (tmp_path / "step_00000007").mkdir()
    assert verify(tmp_path / "step_00000007") == 1
    convert(tmp_path / "x.pt", tmp_path / "ours", to="sharded")
    assert verify(tmp_path / "ours") == 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_conversion_that_is_ended_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    # 2 GiB of zeros that take no room on the disk: more than can be written before the signal comes.
    names = [f"w{index}" for index in range(128)]
    size = 16 << 20
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [index * size, (index + 1) * size]}
        for index, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    source = tmp_path / "source.safetensors"
    with source.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + len(names) * size)
    command = [sys.executable, "-m", "model_check", "checkpoint", "convert", str(source), str(tmp_path / "x.pt")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=hear_signals
    ) as running:
        while running.poll() is None and not any(path.stat().st_size for path in tmp_path.glob(".x.pt.*.tmp")):
            time.sleep(0.005)
        running.send_signal(number)
        out, _ = running.communicate(timeout=60)
    assert (running.returncode, out) == (code, "")
    assert list(tmp_path.iterdir()) == [source]


STREAM = """
import sys
from pathlib import Path
import torch
from model_check.checkpoint.weight_files import StoredTensor
from model_check.checkpoint import weight_writers
from model_check.cli.checkpoint import convert

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024

def reset():
    Path("/proc/self/clear_refs").write_text("5")

folder, tensors, size = Path(sys.argv[1]), 32, 4 << 20
made = {
    f"layer{i}.weight": StoredTensor(torch.float32, (size // 4,), lambda i=i: torch.full((size // 4,), float(i)))
    for i in range(tensors)
}
weight_writers.write_pt(folder / "s0.pt", made, {})
chain = ["s0.pt", "s1.safetensors", "s2", "s3.pt", "s4.safetensors"]
for form in ("warm.pt", "warm.safetensors"):
    convert(folder / chain[0], folder / form)  # imports and buffers that come once
for source, target in zip(chain, chain[1:]):
    before = resident()
    reset()
    convert(folder / source, folder / target, to="sharded" if target == "s2" else None)
    print("grew", source, target, peak() - before)
last = torch.load(folder / "s3.pt", weights_only=True, mmap=True)["model"]
assert all(bool((last[f"layer{i}.weight"] == i).all()) for i in range(tensors))
"""


@pytest.mark.slow
def test_converting_128_mib_grows_by_a_few_tensors_only(tmp_path: Path) -> None:
    # Freed memory goes back at once: what malloc likes to keep for later is not what converting needs.
    returned = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(tmp_path)], capture_output=True, text=True, env={**os.environ, **returned}
    )
    assert done.returncode == 0, done.stderr
    grown = [line.split() for line in done.stdout.splitlines() if line.startswith("grew")]
    assert len(grown) == 4
    for _, source, target, bytes_ in grown:
        # One tensor is 4 MiB; the model is 128 MiB.
        assert int(bytes_) < 16 << 20, f"{source} to {target} grew by {int(bytes_) >> 20} MiB"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> torch.Tensor:
        raise OSError(5, "Input/output error")

    tensors = {"w": StoredTensor(torch.float32, (4,), broken)}
    for write, name in ((weight_writers.write_pt, "x.pt"), (weight_writers.write_sharded, "x")):
        with pytest.raises(CheckpointError, match="Input/output error"):
            write(tmp_path / name, tensors, {})
    assert list(tmp_path.iterdir()) == []
