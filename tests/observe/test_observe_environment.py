"""The snapshot of a run's surroundings, and that no secret is in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.observe.environment import git_commit
from model_check.observe.redaction import REDACTED, looks_secret, redact_argv, redact_text, redact_variables

SECRETS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=6, max_size=40).filter(
    lambda text: text not in REDACTED and "@" not in text
)
SECRET_NAMES = st.builds(
    lambda before, word, after: f"{before}{word}{after}",
    st.sampled_from(["", "HF_", "MY_", "wandb_api_"]),
    st.sampled_from(["KEY", "key", "TOKEN", "Secret", "PASSWORD", "CREDENTIALS", "AUTH"]),
    st.sampled_from(["", "_1", "_FILE"]),
)


@given(SECRET_NAMES, SECRETS)
def test_a_secret_variable_never_shows_anywhere(name: str, secret: str) -> None:
    environ = {name: secret, "COMMAND": f"run --with {secret} --now", "PATH": "/bin"}
    shown = redact_variables(environ)
    assert shown[name] == REDACTED and shown["PATH"] == "/bin"
    assert secret not in shown["COMMAND"].replace(REDACTED, "")
    argv = redact_argv(["train", secret, f"--x={secret}"], environ)
    assert secret not in " ".join(argv).replace(REDACTED, "")


@given(st.sampled_from(["--token", "--hf-token", "--api_key", "--password"]), SECRETS)
def test_a_secret_flag_never_shows_its_value(flag: str, secret: str) -> None:
    value = secret.removeprefix("--") or "value"
    assert redact_argv(["x", flag, value, "end"], {}) == ["x", flag, REDACTED, "end"]
    assert redact_argv(["x", f"{flag}={value}", "end"], {}) == ["x", f"{flag}={REDACTED}", "end"]


@given(
    st.sampled_from(["http", "https", "s3", "redis+tls"]),
    st.text("abcXYZ019._~%!$&'()*+,;=:-", min_size=1),
    st.text("abcXYZ019._~%:-", min_size=1),
)
def test_user_and_password_of_a_url_never_show(scheme: str, user: str, password: str) -> None:
    shown = redact_text(f"see {scheme}://{user}:{password}@host.example:80/path?x=1#y for more")
    assert shown == f"see {scheme}://{REDACTED}@host.example:80/path?x=1#y for more"


def test_tokens_of_well_known_shape_go_wherever_they_are() -> None:
    token = "hf_" + "aB3" * 11
    assert redact_text(f"Bearer {token}.") == f"Bearer {REDACTED}."
    assert redact_variables({"NOTE": f"mine is {token}"})["NOTE"] == f"mine is {REDACTED}"


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "GIT_AUTHOR_NAME", "PATH", "data.tokenizer", "NCCL_DEBUG"])
def test_names_that_are_no_secrets(name: str) -> None:
    assert not looks_secret(name)


def test_configuration_on_the_command_line_stays_readable() -> None:
    argv = ["model-check", "train", "--set", "data.tokenizer=bytes", "--set", "hub.token=abc", "--max-steps", "5"]
    assert redact_argv(argv, {}) == [*argv[:5], f"hub.token={REDACTED}", *argv[6:]]


def test_an_empty_secret_and_a_short_one_do_not_blank_the_rest() -> None:
    shown = redact_variables({"HF_TOKEN": "", "API_KEY": "1", "LEVEL": "11"})
    assert shown == {"HF_TOKEN": "", "API_KEY": REDACTED, "LEVEL": "11"}


def test_the_snapshot_of_a_process_that_holds_a_token(tmp_path: Path) -> None:
    token = "a-very-secret-value"
    code = (
        "import json; from model_check.observe.environment import snapshot_environment as s; import torch;"
        "print(json.dumps(s())); assert not torch.cuda.is_initialized()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, f"--note={token}"],
        env={**os.environ, "HF_TOKEN": token, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert token not in answer.stdout
    seen = json.loads(answer.stdout)
    assert seen["argv"] == ["-c", f"--note={REDACTED}"]
    assert seen["python"] == ".".join(map(str, sys.version_info[:3]))
    assert seen["torch"] == seen["packages"]["torch"] or seen["torch"].startswith(seen["packages"]["torch"])
    assert seen["cpu_count"] == os.cpu_count() and seen["memory_bytes"] > 0
    assert seen["git_commit"] is None and seen["cwd"] == str(tmp_path)


def test_the_commit_says_whether_the_tree_was_clean(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        quiet = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], env=quiet, capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{commit}+changes"
