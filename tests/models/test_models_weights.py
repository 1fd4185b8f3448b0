"""Hugging Face folders in and out: the same tokens after export, and a sentence for every way they do not fit."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from model_check.config.folder import read_folder_shape
from model_check.config.shapes import ModelShape, RopeScaling
from model_check.errors import HubUnavailable, ModelError
from model_check.models import (
    Llama,
    build_meta_model,
    build_model,
    load_pretrained,
)
from model_check.models.hub import pretrained_folder
from tests.models.exported import export

SHAPE = ModelShape(3, 64, 4, 2, 16, 96, 83, max_position=128)
SCALED = replace(SHAPE, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32), norm_eps=1e-6, rope_theta=250_000.0)


def greedy(model: Llama, tokens: torch.Tensor, count: int) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sharded", [False, True], ids=["one_file", "sharded"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_generates_the_same_tokens_after_export(
    tmp_path: Path, tied: bool, sharded: bool, dtype: torch.dtype
) -> None:
    model = build_model(replace(SCALED, tie_embeddings=tied), seed=4, init_std=0.2, dtype=dtype)
    folder = export(model, tmp_path / "out", most=30_000 if sharded else 1 << 30)
    assert len(list(folder.glob("*.safetensors"))) == 1 or sharded
    assert (folder / "model.safetensors.index.json").exists() == sharded

    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == dtype
    prompt = torch.tensor([[5, 17, 60]])
    if dtype == torch.float32:
        generated = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        assert generated.shape == (1, 23)
        assert torch.equal(generated, greedy(model, prompt, 20))
    else:
        for name, weight in theirs.state_dict().items():
            assert weight.dtype == dtype, name
        torch.testing.assert_close(theirs(prompt).logits, model(prompt), atol=0.1, rtol=0.02)


def test_a_transformers_folder_loads_and_computes_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=83,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 250_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        initializer_range=0.2,
        max_position_embeddings=128,
    )
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()

    shape = read_folder_shape(tmp_path)
    assert shape == SCALED
    model = build_meta_model(shape).to_empty(device="cpu")
    load_pretrained(model, tmp_path)
    tokens = torch.randint(0, 83, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=2e-5, rtol=1e-5)


def test_a_round_trip_is_bit_exact_and_a_shallower_model_takes_the_first_layers(tmp_path: Path) -> None:
    model = build_model(SCALED, seed=9)
    export(model, tmp_path / "out", most=40_000)
    assert read_folder_shape(tmp_path / "out") == SCALED

    shallow = build_model(replace(SCALED, num_layers=2), seed=1)
    load_pretrained(shallow, tmp_path / "out")
    weights = model.state_dict()
    assert len(shallow.state_dict()) == len(weights) - 9
    for name, weight in shallow.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def test_missing_unexpected_and_misshaped_tensors_are_all_listed_before_anything_is_copied(tmp_path: Path) -> None:
    folder = export(build_model(SHAPE, seed=1), tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["lm_head.weight"] = torch.zeros(84, 64)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    model = build_model(SHAPE, seed=2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(ModelError) as caught:
        load_pretrained(model, folder)
    message = str(caught.value)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in message
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias" in message
    assert "1 of another shape: lm_head.weight [84, 64] instead of [83, 64]" in message
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_model_deeper_than_the_checkpoint_names_the_missing_layers(tmp_path: Path) -> None:
    folder = export(build_model(SHAPE), tmp_path / "out")
    with pytest.raises(ModelError, match=r"9 missing: model\.layers\.3\..* and 1 more"):
        load_pretrained(build_model(replace(SHAPE, num_layers=4)), folder)


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    model = build_model(SHAPE)
    folder = export(model, tmp_path / "out", most=60_000)
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=f"{shard.name} is not a whole safetensors file"):
        load_pretrained(model, folder)
    shard.unlink()
    with pytest.raises(ModelError, match=f"lacks {shard.name}"):
        load_pretrained(model, folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../../etc/passwd"}}')
    with pytest.raises(ModelError, match="points outside its folder"):
        load_pretrained(model, folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="is not an index of safetensors"):
        load_pretrained(model, folder)


def test_sources_that_are_neither_folder_nor_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model folder"):
        pretrained_folder(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        pretrained_folder(tmp_path)


def test_without_a_network_the_hub_is_not_even_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreachable_port: int
) -> None:
    """Its client retries for half a minute where packets are dropped; one look at the port must decide."""
    real, asked = huggingface_hub.snapshot_download, []

    def watched(*args: Any, **kwargs: Any) -> str:
        asked.append(kwargs["local_files_only"])
        return real(*args, **kwargs)

    monkeypatch.setattr("huggingface_hub.snapshot_download", watched)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{unreachable_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    with pytest.raises(HubUnavailable, match=r"meta-llama/Llama-9 is neither .*model\.init=random") as caught:
        pretrained_folder("meta-llama/Llama-9")
    assert asked == [True]
    assert "secret" not in str(caught.value)


def test_a_hub_that_accepts_and_says_nothing_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client would ask five times and wait ten seconds each time."""
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("model_check.config.endpoint.ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        with pytest.raises(HubUnavailable, match=f"{endpoint} cannot be reached"):
            pretrained_folder("meta-llama/Llama-9")


@pytest.fixture
def unreachable_port() -> int:
    """A loopback port that was free a moment ago: connecting to it is refused."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_loading_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """A child loads 50 MB of weights into a model that has its memory already: its heap may grow by 10 MB, no more."""
    shape = ModelShape(5, 512, 8, 8, 64, 1024, 64)
    folder = export(build_model(shape), tmp_path / "out", most=30_000_000)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    script = textwrap.dedent(
        """
        import sys, torch
        from pathlib import Path
        from model_check.config.folder import read_folder_shape
        from model_check.models import build_meta_model, load_pretrained
        torch.set_num_threads(1)
        model = build_meta_model(read_folder_shape(Path(sys.argv[1]))).to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.zero_()

        def anonymous_kib():
            fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
            return int(fields["Anonymous"].split()[0])

        before = anonymous_kib()
        peak = before
        copy = torch.Tensor.copy_
        def watched(self, other, *rest):
            global peak
            result = copy(self, other, *rest)
            peak = max(peak, anonymous_kib())
            return result
        torch.Tensor.copy_ = watched
        load_pretrained(model, sys.argv[1])
        print(peak - before)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    assert size > 50_000_000
    assert int(done.stdout) * 1024 < 10_000_000
