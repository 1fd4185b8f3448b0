"""Every way a configuration can be wrong is answered with its code, the value and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.config import Config, check_world, load_config, resolve_shape, validate_config
from model_check.config.codes import MEANINGS
from model_check.config.schema import leaf_fields
from model_check.errors import ConfigError, UsageError

CPU = {"device": "cpu"}

# (content over the debug preset, code, words of the message, words of the remedy)
WRONG_VALUES = [
    ({"training": {"lr": 1e-4}}, "MC806", "training.lr", "did you mean training.learning_rate?"),
    ({"training": {"gradient_accumulation_steps": 2}}, "MC806", "is not a known key", "training.grad_accum_nums"),
    ({"training": {"num_layers": 2}}, "MC806", "training.num_layers", "did you mean model.num_layers?"),
    ({"training": {"warmup_steps": 2}}, "MC806", "training.warmup_steps", "training.scheduler.warmup_steps?"),
    ({"model": {"hiden_size": 64}}, "MC806", "model.hiden_size", "did you mean model.hidden_size?"),
    ({"trainig": {"max_steps": 5}}, "MC806", "trainig", "did you mean training?"),
    ({"max_steps": 5}, "MC806", "max_steps", "did you mean training.max_steps?"),
    ({"debug": {"zzzz": 5}}, "MC806", "debug.zzzz", "debug has nan, on_nan, dump_gb"),
    ({"qqqq": 5}, "MC806", "qqqq", "the sections are model, data"),
    ({"training": 5}, "MC803", "training=5", "write keys below training"),
    ({"training": {"scheduler": "cosine"}}, "MC803", 'training.scheduler="cosine"', "write keys below"),
    ({"training": {"max_steps": "10"}}, "MC810", 'training.max_steps="10"', "write 10 without quotes"),
    ({"training": {"max_steps": "ten"}}, "MC810", 'training.max_steps="ten"', "write a whole number"),
    ({"training": {"max_steps": 1e4}}, "MC810", "training.max_steps=10000.0", "write 10000"),
    ({"training": {"max_steps": True}}, "MC810", "training.max_steps=true", "write a whole number"),
    ({"training": {"max_steps": {"a": 1}}}, "MC810", 'training.max_steps={"a": 1}', "write a whole number"),
    ({"training": {"learning_rate": "nan"}}, "MC810", 'training.learning_rate="nan"', "write a number"),
    ({"training": {"learning_rate": "1e-4"}}, "MC810", 'training.learning_rate="1e-4"', "write 0.0001 without quotes"),
    ({"training": {"use_amp": "no"}}, "MC810", 'training.use_amp="no"', "write false"),
    ({"training": {"use_amp": 1}}, "MC810", "training.use_amp=1", "write true"),
    ({"training": {"betas": [0.9]}}, "MC810", "training.betas=[0.9]", "write two numbers"),
    ({"training": {"betas": [0.9, 0.95, 0.99]}}, "MC810", "wrong number of entries", "write two numbers"),
    ({"data": {"subset": 3}}, "MC810", "data.subset=3", 'put it in quotes: "3"'),
    ({"training": {"batch_size": 0}}, "MC811", "training.batch_size=0", "raise it to 1"),
    ({"training": {"learning_rate": -1e-4}}, "MC811", "training.learning_rate=-0.0001", "raise it above 0"),
    ({"training": {"learning_rate": 30}}, "MC811", "training.learning_rate=30", "lower it to 1"),
    ({"training": {"betas": [0.9, 1.0]}}, "MC811", "training.betas=[0.9, 1.0]", "lower it below 1"),
    ({"data": {"validation_fraction": 0.9}}, "MC811", "data.validation_fraction=0.9", "lower it to 0.5"),
    ({"data": {"dataset": ""}}, "MC811", 'data.dataset=""', "name something"),
    ({"launch": {"memory_limit_gb": 0.7}}, "MC811", "launch.memory_limit_gb=0.7", "raise it to 2"),
    ({"training": {"precision": "bfloat16"}}, "MC812", 'training.precision="bfloat16"', "did you mean bf16?"),
    ({"training": {"scheduler": {"type": "step"}}}, "MC812", '"step"', "write constant"),
    ({"system": {"device": "gpu"}}, "MC812", 'system.device="gpu"', "did you mean cuda?"),
    ({"training": {"precision": "float32"}}, "MC812", "is not one of bf16, fp16, fp32, fp8", "did you mean fp32?"),
    (
        {"model": {"hidden_size": 1000, "num_heads": 16}},
        "MC820",
        "model.hidden_size must be divisible by model.num_heads, but 1000 / 16 = 62.5",
        "set model.hidden_size to 992 or 1024",
    ),
    ({"model": {"num_kv_heads": 3}}, "MC821", "4 / 3 = 1.33333", "one of 1, 2, 4"),
    ({"model": {"hidden_size": 60}}, "MC822", "odd head dimension of 15", "even"),
    ({"model": {"num_layers": None, "hidden_size": None}}, "MC823", "model.num_layers and model.hidden_size", "llama"),
    ({"model": {"init": "pretrained"}}, "MC824", "model.model_path is null", "set model.model_path"),
    (
        {"model": {"init": "pretrained", "model_path": "llama-3.2-1b", "num_layers": 2}},
        "MC825",
        "model.num_layers=2 differs from the 16 of the weights",
        "set model.num_layers to null",
    ),
    ({"model": {"model_path": "llama-3.1-9b"}}, "MC826", "llama-3.1-9b", "llama-3.1-8b"),
    ({"model": {"model_path": "./no/such/folder"}}, "MC826", "./no/such/folder", "name a folder"),
    (
        {"training": {"scheduler": {"warmup_steps": 1000}}},
        "MC830",
        "training.scheduler.warmup_steps=1000 exceeds training.max_steps=10",
        "lower the warm-up",
    ),
    (
        {"training": {"scheduler": {"type": "wsd", "warmup_steps": 4, "decay_fraction": 0.8}}},
        "MC831",
        "training.scheduler.warmup_steps=4 and the 8 steps",
        "lower one of the two",
    ),
    (
        {"training": {"eval_interval": 5}, "data": {"validation_fraction": 0}},
        "MC832",
        "training.eval_interval=5",
        "set data.validation_fraction",
    ),
    (
        {"training": {"global_batch": 100, "batch_size": 48}},
        "MC833",
        "global_batch=100 is not divisible by batch_size=48",
        "try 96 or 144",
    ),
    (
        {"training": {"global_batch": 3, "batch_size": 2, "grad_accum_nums": 2}},
        "MC833",
        "global_batch=3 is not divisible by batch_size*grad_accum_nums=4",
        "try 4",
    ),
    ({"debug": {"on_nan": "rollback"}}, "MC835", "checkpoint.interval=0 saves nothing", "checkpoint.interval to 100"),
    ({"system": CPU | {"device_id": 3}}, "MC840", "system.device_id=3", "system.device_id to null"),
    ({"system": CPU | {"backend": "nccl"}}, "MC841", "system.backend=nccl", "gloo"),
    (
        {"system": CPU, "model": {"attention_backend": "flash"}},
        "MC842",
        "model.attention_backend=flash",
        "set model.attention_backend to auto",
    ),
    (
        {"model": {"attention_backend": "cudnn"}, "training": {"precision": "bf16", "use_amp": False}},
        "MC843",
        "training.use_amp=false means fp32",
        "set model.attention_backend to auto",
    ),
    (
        {"training": {"optimizer_states": "8bit"}, "parallel": {"strategy": "fsdp"}},
        "MC858",
        "training.optimizer_states=8bit needs whole parameters, and parallel.strategy=fsdp keeps them in shards",
        "set it to bf16",
    ),
    (
        {"training": {"optimizer_states": "8bit"}, "parallel": {"tensor": 2}},
        "MC858",
        "parallel.tensor=2 keeps them in shards",
        "parallel.strategy=ddp alone",
    ),
    (
        {"training": {"optimizer_states": "8bit"}, "fsdp": {"cpu_offload": True}},
        "MC858",
        "fsdp.cpu_offload=true keeps them in shards",
        "set it to bf16",
    ),
    ({"parallel": {"context": 3}}, "MC857", "training.context_length=512 cannot be cut into the 6", "a multiple of 6"),
    (
        {"parallel": {"context": 2}, "data": {"document_mask": True}},
        "MC857",
        "data.document_mask=true",
        "set data.document_mask to false",
    ),
    (
        {"parallel": {"context": 2}, "model": {"attention_backend": "flash"}, "training": {"precision": "bf16"}},
        "MC857",
        "model.attention_backend=flash takes no mask",
        "set model.attention_backend to auto",
    ),
    ({"parallel": {"pipeline": 3}}, "MC852", "parallel.pipeline=3 stages cannot share model.num_layers=2", "2 or less"),
    (
        {"parallel": {"pipeline": 2}, "model": {"tie_embeddings": True}},
        "MC852",
        "tied embedding on the first and the last stage",
        "set model.tie_embeddings to false",
    ),
    ({"parallel": {"tensor": 4}}, "MC853", "model.num_kv_heads=2 cannot be cut", "common divisor"),
    (
        {"parallel": {"strategy": "fsdp", "shard": 2}},
        "MC854",
        "parallel.strategy=fsdp",
        "set parallel.strategy to hsdp",
    ),
    (
        {"parallel": {"tensor": 2}, "training": {"precision": "fp8"}},
        "MC855",
        "training.precision=fp8 scales whole matrices",
        "use bf16",
    ),
    (
        {"parallel": {"pipeline": 2}, "training": {"precision": "bf16"}, "fsdp": {"use_mixed_precision": False}},
        "MC855",
        "fsdp.use_mixed_precision=false",
        "set it to true",
    ),
    (
        {"parallel": {"strategy": "ddp"}, "fsdp": {"cpu_offload": True}},
        "MC856",
        "fsdp.cpu_offload=true",
        "set parallel.strategy to fsdp or hsdp",
    ),
]


@pytest.mark.parametrize(("content", "code", "message", "remedy"), WRONG_VALUES)
def test_a_wrong_value_is_named_with_remedy_and_file(
    tmp_path: Path, content: dict, code: str, message: str, remedy: str
) -> None:
    file = tmp_path / "my.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        load_config(file, preset="debug")
    matching = [problem for problem in caught.value.problems if problem.code == code and message in problem.message]
    assert matching, str(caught.value)
    assert remedy in matching[0].remedy
    assert str(file) in matching[0].message
    assert caught.value.exit_code == 2
    assert {problem.code for problem in caught.value.problems} == {code}


# (file name, text, code, words of the answer)
WRONG_FILES = [
    ("my.json", '{"training": {"max_steps": 5}', "MC802", "line 1 column 30"),
    ("my.json", "training:\n  max_steps: 5\n", "MC802", "name the file .yaml if it is YAML"),
    ("my.json", '{"training": {"max_steps": 5, "max_steps": 6}}', "MC802", "max_steps stands twice"),
    ("my.json", "[,]", "MC802", "is not valid JSON"),
    ("my.json", "[" * 100_000, "MC802", "is not valid JSON"),
    ("my.json", '{"training": {"learning_rate": NaN}}', "MC811", "training.learning_rate=NaN"),
    ("my.json", "[1, 2]", "MC803", "holds [1, 2] where sections are expected"),
    ("my.yaml", "training:\n  max_steps: [5\n", "MC802", "is not valid YAML"),
    ("my.yaml", "training:\n  max_steps: 5\n  max_steps: 6\n", "MC802", "max_steps stands twice"),
    ("my.yaml", "training: &t\n  max_steps: *t\n", "MC810", "training.max_steps="),
    ("my.yaml", "training: !!python/object/apply:os.getcwd []\n", "MC802", "python/object/apply"),
    ("my.yml", "training:\n  max_steps: 010\n", "MC810", "write 10 without quotes"),
]


@pytest.mark.parametrize(("name", "text", "code", "answer"), WRONG_FILES)
def test_a_wrong_file_is_answered_without_a_traceback(
    tmp_path: Path, name: str, text: str, code: str, answer: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, preset="debug")
    assert [problem.code for problem in caught.value.problems] == [code]
    assert answer in str(caught.value)
    assert str(file) in str(caught.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    binary = tmp_path / "weights.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "nowhere.json", binary, tmp_path)
    assert [problem.code for problem in caught.value.problems] == ["MC801", "MC802", "MC801"]
    assert "nowhere.json cannot be read: No such file or directory" in str(caught.value)
    assert "is not UTF-8 text (byte 0)" in str(caught.value)


@pytest.mark.parametrize(
    ("assignment", "code", "answer"),
    [
        ("training.max_steps", "MC804", "--set training.max_steps is not of the form section.key=value"),
        ("=5", "MC804", "write it like --set training.max_steps=10"),
        ("training.max_steps=[5", "MC804", "has a value that cannot be read"),
        ("training.max_steps.a=5", "MC806", "training.max_steps takes one value"),
        ("training.max_steps=", "MC810", "training.max_steps=null (from --set) must be a whole number"),
        ("training=3", "MC803", "training=3 (from --set) must be a section"),
    ],
)
def test_a_wrong_assignment(assignment: str, code: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(preset="debug", overrides=[assignment])
    assert [problem.code for problem in caught.value.problems] == [code]
    assert answer in str(caught.value)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"MC805.*there is no preset prod;.*did you mean production\?"):
        load_config(preset="prod")


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "my.json"
    content = {
        "training": {"lr": 1, "batch_size": 0, "precision": "int4", "max_steps": "ten"},
        "model": {"num_kv_heads": 3},
    }
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "gone.json", file, preset="debug", overrides=["nonsense"])
    codes = sorted(problem.code for problem in caught.value.problems)
    assert codes == ["MC801", "MC804", "MC806", "MC810", "MC811", "MC812", "MC821"]
    assert str(caught.value).startswith("7 problems in the configuration:")


def test_a_rule_does_not_judge_the_stand_in_of_a_refused_value() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(preset="debug", overrides=["model.num_heads=x", "training.scheduler.warmup_steps=50"])
    assert [problem.code for problem in caught.value.problems] == ["MC810", "MC830"]


def test_an_unknown_key_does_not_show_its_value() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["system.hf_token=hf_secret"])
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (["training.global_batch=144", "training.batch_size=12"], 4, []),
        (
            ["training.global_batch=100", "training.batch_size=4"],
            12,
            ["global_batch=100 is not divisible by batch_size*dp=48; try 96 or 144"],
        ),
        (
            ["training.global_batch=32", "training.batch_size=4", "training.grad_accum_nums=2"],
            8,
            [
                "global_batch=32 differs from batch_size*grad_accum_nums*dp=64; set training.global_batch to 64, "
                "or training.grad_accum_nums to null to have it derived"
            ],
        ),
        (["training.global_batch=64", "training.batch_size=4", "training.grad_accum_nums=2"], 8, []),
        ([], 7, []),
        (
            ["debug.verify_gradients=5"],
            1,
            [
                "debug.verify_gradients=5 compares replicas, and one rank has no peer; set parallel.strategy=ddp with "
                "two ranks or more, or debug.verify_gradients=0"
            ],
        ),
        (
            ["training.oom_retry=true", "parallel.strategy=fsdp"],
            2,
            [
                "training.oom_retry=true repeats a step on one rank alone, and parallel.strategy=fsdp keeps parameters "
                "in shards; set parallel.strategy=ddp, or training.oom_retry=false and a smaller training.batch_size"
            ],
        ),
        (["training.oom_retry=true", "parallel.strategy=fsdp"], 1, []),
        (["debug.verify_gradients=5", "training.oom_retry=true", "parallel.strategy=ddp"], 2, []),
    ],
)
def test_the_number_of_ranks(overrides: list[str], world_size: int, expected: list[str]) -> None:
    config = load_config(preset="debug", overrides=overrides)
    assert [str(problem) for problem in check_world(config, world_size)] == expected


def test_what_needs_replicas_is_said_of_each_setting() -> None:
    overrides = ["debug.verify_gradients=5", "training.oom_retry=true", "parallel.tensor=2"]
    problems = check_world(load_config(preset="debug", overrides=overrides), 2)
    assert [(problem.code, problem.key) for problem in problems] == [
        ("MC859", "debug.verify_gradients"),
        ("MC859", "training.oom_retry"),
    ]


def test_a_global_batch_that_contradicts_the_accumulation() -> None:
    overrides = ["training.global_batch=8", "training.batch_size=2", "training.grad_accum_nums=4"]
    problems = check_world(load_config(preset="debug", overrides=overrides), 2)
    assert [(problem.code, problem.key) for problem in problems] == [("MC834", "training.global_batch")]


def test_ranks_that_do_not_fill_the_parallel_groups() -> None:
    config = Config.model_validate({"parallel": {"tensor": 2, "pipeline": 2}})
    assert [problem.code for problem in check_world(config, 6)] == ["MC850"]
    assert check_world(config, 8) == []
    assert config.data_parallel(8) == 2


def test_groups_of_hsdp_must_divide_the_data_parallel_ranks() -> None:
    config = load_config(preset="debug", overrides=["parallel.strategy=hsdp", "parallel.shard=3"])
    assert [problem.code for problem in check_world(config, 4)] == ["MC851"]
    assert check_world(config, 6) == []


@pytest.mark.parametrize(
    ("ranks", "world_size", "sentence"),
    [
        ([5], 1, "training.profile_ranks=[5] names none of the ranks, and this job has rank 0 alone"),
        ([4, 7], 4, "training.profile_ranks=[4, 7] names none of the ranks, and this job has ranks 0 to 3"),
        ([], 2, "training.profile_ranks=[] names none of the ranks, and this job has ranks 0 to 1"),
    ],
)
def test_a_profile_of_no_rank_is_refused(ranks: list[int], world_size: int, sentence: str) -> None:
    config = Config.model_validate({"training": {"profile": True, "profile_ranks": ranks}})
    assert [(problem.code, problem.message) for problem in check_world(config, world_size)] == [("MC811", sentence)]
    assert check_world(Config.model_validate({"training": {"profile_ranks": ranks}}), world_size) == []
    assert check_world(Config.model_validate({"training": {"profile": True, "profile_ranks": [1, *ranks]}}), 2) == []


def test_accumulation_follows_the_global_batch() -> None:
    config = load_config(preset="debug", overrides=["training.global_batch=48", "training.batch_size=4"])
    assert [config.accumulation(ranks) for ranks in (1, 2, 4)] == [12, 6, 3]
    assert load_config(preset="debug").accumulation(4) == 1
    assert load_config(preset="debug", overrides=["training.grad_accum_nums=8"]).accumulation(2) == 8


def test_the_context_of_pretrained_weights() -> None:
    overrides = ["model.init=pretrained", "model.model_path=llama-2-7b", "model.num_layers=null"]
    with pytest.raises(ConfigError, match=r"MC828.*training.context_length=8192.*4096 positions.*lower it to 4096"):
        load_config(overrides=overrides)
    assert load_config(overrides=[*overrides, "training.context_length=4096"]).model.init == "pretrained"


def test_a_tokenizer_larger_than_the_model() -> None:
    with pytest.raises(UsageError, match=r"MC829.*vocabulary of 128256 is smaller than the tokenizer's 152064"):
        resolve_shape(load_config().model, 152064)


def test_a_model_folder_that_holds_no_llama(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r'MC827.*model_type="gpt2" where "llama" is needed'):
        load_config(overrides=[f"model.model_path={tmp_path}"])


def test_a_trial_cut_short_by_a_flag_keeps_its_warm_up() -> None:
    config = load_config(preset="full", values={"training.max_steps": (5, "flag --max-steps")})
    assert (config.training.max_steps, config.training.scheduler.warmup_steps) == (5, 200)


def test_validate_config_takes_objects_dicts_and_paths(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  hidden_size: 1000\n  num_heads: 16\n")
    expected = "model.hidden_size must be divisible by model.num_heads, but 1000 / 16 = 62.5"
    for bad in (file, str(file), {"model": {"hidden_size": 1000, "num_heads": 16}}):
        ok, errors = validate_config(bad)
        assert not ok
        assert [expected in error for error in errors] == [True]
    assert validate_config({"model": {"hidden_size": 1024, "num_heads": 16}}) == (True, [])
    assert validate_config(load_config(preset="debug")) == (True, [])
    incomplete = validate_config(Config())
    assert incomplete[0] is False
    assert "model.model_path is null" in incomplete[1][0]
    assert validate_config(tmp_path / "nowhere.json")[0] is False
    assert validate_config([1])[0] is False  # type: ignore[arg-type]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.just("~nobody")
    | st.just("x" * 5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=4,
)
keys = st.sampled_from([*leaf_fields(Config), "training", "training.scheduler"]) | st.text(max_size=8)


@given(content=st.dictionaries(keys, values, max_size=6))
def test_no_content_makes_validate_config_raise(content: dict) -> None:
    ok, errors = validate_config(content)
    assert ok is (errors == [])
    assert all("; " in error for error in errors), "a problem has no remedy"


@pytest.mark.parametrize("path", ["~nobody/model", "x" * 5000, "a\0b", "/proc/1/root/model"])
def test_a_model_path_that_no_file_system_has(path: str) -> None:
    ok, errors = validate_config({"model": {"model_path": path}})
    assert (ok, len(errors)) == (False, 1)
    assert "is neither a built-in shape nor a folder" in errors[0]


def test_every_code_has_a_failing_input() -> None:
    source = Path(__file__).read_text()
    assert [code for code in MEANINGS if code not in source] == []
