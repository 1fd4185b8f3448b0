"""Hugging Face folders in and out: the same tokens after export, and a sentence for every way they do not fit."""

from __future__ import annotations

import json
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
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from model_check.config.shapes import ModelShape, RopeScaling
from model_check.errors import HubUnavailable, ModelError
from model_check.models import (
    Llama,
    build_empty_model,
    build_model,
    load_pretrained,
    save_pretrained,
    shape_from_config,
    shape_from_pretrained,
)

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
    folder = save_pretrained(model, tmp_path / "out", max_shard_bytes=30_000 if sharded else 1 << 30)
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

    shape = shape_from_pretrained(tmp_path)
    assert shape == SCALED
    model = build_empty_model(shape)
    load_pretrained(model, tmp_path)
    tokens = torch.randint(0, 83, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=2e-5, rtol=1e-5)


def test_a_round_trip_is_bit_exact_and_a_shallower_model_takes_the_first_layers(tmp_path: Path) -> None:
    model = build_model(SCALED, seed=9)
    save_pretrained(model, tmp_path / "out", max_shard_bytes=40_000)
    assert shape_from_pretrained(tmp_path / "out") == SCALED

    shallow = build_model(replace(SCALED, num_layers=2), seed=1)
    load_pretrained(shallow, tmp_path / "out")
    weights = model.state_dict()
    assert len(shallow.state_dict()) == len(weights) - 9
    for name, weight in shallow.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def test_the_tokenizer_travels_with_the_model(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "any-name.json"))
    folder = save_pretrained(
        build_model(SHAPE), tmp_path / "out", tokenizer_file=tmp_path / "any-name.json", eos_token_id=2
    )
    assert AutoTokenizer.from_pretrained(folder)("the cat dog")["input_ids"] == [1, 2, 0]
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2


def test_an_export_never_overwrites_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = build_model(SHAPE)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("keep")
    with pytest.raises(ModelError, match="exists and is not an empty folder"):
        save_pretrained(model, tmp_path / "full")
    with pytest.raises(ModelError, match="cannot be written"):
        save_pretrained(model, tmp_path / "new", tokenizer_file=tmp_path / "absent.json")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert (tmp_path / "full" / "precious.txt").read_text() == "keep"


def test_missing_unexpected_and_misshaped_tensors_are_all_listed_before_anything_is_copied(tmp_path: Path) -> None:
    folder = save_pretrained(build_model(SHAPE, seed=1), tmp_path / "out")
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
    folder = save_pretrained(build_model(SHAPE), tmp_path / "out")
    with pytest.raises(ModelError, match=r"9 missing: model\.layers\.3\..* and 1 more"):
        load_pretrained(build_model(replace(SHAPE, num_layers=4)), folder)


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    model = build_model(SHAPE)
    folder = save_pretrained(model, tmp_path / "out", max_shard_bytes=60_000)
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
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        shape_from_pretrained(folder)


LLAMA_2 = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 83,
}


def test_an_old_config_gets_the_defaults_of_transformers() -> None:
    shape = shape_from_config(LLAMA_2)
    theirs = LlamaConfig(**LLAMA_2)
    assert shape.num_kv_heads == theirs.num_key_value_heads == 4
    assert shape.head_dim == theirs.head_dim == 16
    assert shape.norm_eps == theirs.rms_norm_eps
    assert shape.max_position == theirs.max_position_embeddings
    assert shape.tie_embeddings is theirs.tie_word_embeddings is False
    assert shape.rope_theta == theirs.rope_parameters["rope_theta"] == 10_000.0
    assert shape.rope_scaling is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "gpt2"}, 'model_type="gpt2"'),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu"'),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"hidden_size": None}, "hidden_size=null where a positive number is needed"),
        ({"num_hidden_layers": "3"}, 'num_hidden_layers="3" where a positive number is needed'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type="yarn"'),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
            "low_freq_factor=null where a positive number is needed",
        ),
    ],
)
def test_configs_that_are_not_plain_llama_are_refused(change: dict, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as caught:
        shape_from_config({**LLAMA_2, **change}, "x/config.json")
    assert caught.value.remedy


def test_sources_that_are_neither_folder_nor_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model folder"):
        shape_from_pretrained(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        shape_from_pretrained(tmp_path)


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
        shape_from_pretrained("meta-llama/Llama-9")
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
            shape_from_pretrained("meta-llama/Llama-9")


@pytest.fixture
def unreachable_port() -> int:
    """A loopback port that was free a moment ago: connecting to it is refused."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_loading_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """A child loads 50 MB of weights into a model that has its memory already: its heap may grow by 10 MB, no more."""
    shape = ModelShape(5, 512, 8, 8, 64, 1024, 64)
    folder = save_pretrained(build_model(shape), tmp_path / "out", max_shard_bytes=30_000_000)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    script = textwrap.dedent(
        """
        import sys, torch
        from model_check.models import build_empty_model, load_pretrained, shape_from_pretrained
        torch.set_num_threads(1)
        model = build_empty_model(shape_from_pretrained(sys.argv[1]))
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
