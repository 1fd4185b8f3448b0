"""The snapshot of a run's surroundings, and that no secret is in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.record.environment import git_commit
from model_check.record.redaction import REDACTED, looks_secret, redact_argv, redact_text, redact_variables

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


# Texts around a secret that no variable or flag names.
HOLDERS = [
    "DefaultEndpointsProtocol=https;AccountName=me;AccountKey={};EndpointSuffix=core.windows.net",
    "Endpoint=sb://bus.example/;SharedAccessKeyName=all;SharedAccessKey={}",
    "https://me.blob.core.windows.net/data/a.bin?sv=2024-01-01&se=2026-01-01&sp=r&sig={}",
    "https://bucket.s3.amazonaws.com/a?X-Amz-Credential=x&X-Amz-Signature={}&X-Amz-Expires=60",
    "https://storage.googleapis.com/b/o?X-Goog-Signature={}",
    "https://d.cloudfront.net/x?Expires=1&Signature={}&Policy=p",
    "could not connect: host=db user=me password={} dbname=runs",
    "Server=db;User Id=me;Password={};",
    "Authorization: Bearer {}",
    "curl -H 'Authorization: Basic {}' https://example.com",
    "{{'Authorization': 'token {}'}}",
    "X-Api-Key: {}",
    'got {{"password": "{}", "user": "me"}}',
    "wandb_api_key={}",
    "aws_secret_access_key = {}",
    "<a href='https://bucket.example/a?x=1&amp;X-Amz-Security-Token={}'>",
    '{{"url": "https://bucket.example/a?x=1\\u0026X-Amz-Security-Token={}"}}',
    "https://proxy.example/get?next=https://hub.example/x?token={}&z=1",
    'curl "https://proxy.example/get"?X-Goog-Signature="{}"',
    "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("holder", HOLDERS)
@given(secret=st.text("abcdefXYZ0189+/=%-_", min_size=20, max_size=60).filter(lambda text: text[0].isalnum()))
def test_a_secret_never_shows_where_its_holder_tells_what_it_is(holder: str, secret: str) -> None:
    text = holder.format(secret)
    shown = redact_text(text)
    assert secret not in shown and REDACTED in shown
    assert redact_text(shown) == shown
    assert secret not in redact_variables({"NOTE": text})["NOTE"]
    assert secret not in " ".join(redact_argv(["train", text], {}))


SIGNATURE_NAMES = ["X-Goog-Signature", "X-Amz-Signature", "x-goog-signature", "Signature", "sig"]
SIGNATURES = st.text("abcdef0123456789", min_size=20, max_size=60).filter(lambda text: any(c.isdigit() for c in text))
# Where the signature of a URL may stand.
PLACES = {
    "query": lambda name, value: f"https://storage.example/b/o?{name}={value}",
    "query, not the first": lambda name, value: f"https://storage.example/b/o?x=1&{name}={value}&y=2",
    "relative": lambda name, value: f"Max retries exceeded with url: /b/o?{name}={value} (Caused by ReadTimeout)",
    "header": lambda name, value: f"{name}: {value}",
    "dictionary": lambda name, value: str({"x": "1", name: value}),
    "parsed query": lambda name, value: str({name: [value]}),
    "pairs": lambda name, value: str([("x", "1"), (name, value)]),
    "JSON": lambda name, value: json.dumps({"x": {name: value}}, indent=1),
    "bytes": lambda name, value: repr(f"https://storage.example/b/o?{name}={value}".encode()),
    "assignment": lambda name, value: f"{name.replace('-', '_')} = '{value}'",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@given(name=st.sampled_from(SIGNATURE_NAMES), value=SIGNATURES, encoded=st.integers(0, 3), words=st.text("ab =:'?&%,"))
def test_a_signed_url_never_shows_its_signature(
    place: Callable[[str, str], str], name: str, value: str, encoded: int, words: str
) -> None:
    text = place(name, value)
    for _ in range(encoded):
        text = "https://proxy.example/?url=" + quote(text, safe="")
    for said in (text, f"{words} {text} {words}"):
        assert value not in redact_text(said)
        assert value not in redact_variables({"NOTE": said})["NOTE"]
        for argv in (["train", said], ["train", "--data", said], [f"--set=data.source={said}"]):
            assert value not in " ".join(redact_argv(argv, {}))
    assert value not in redact_variables({name: value})[name] or name == "sig"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sv=2024-01-01%26sig%3DaB3aB3aB3aB3aB3aB3%2Bx%3D%26se%3D1", f"sv=2024-01-01&sig={REDACTED}&se=1"),
        ("conn=AccountName%3Dme%3BAccountKey%3DaB3aB3%3D%3D%3BE%3D1", f"conn=AccountName=me;AccountKey={REDACTED};E=1"),
        ("AccountKey%3DaB3aB3%253D next%20word", f"AccountKey={REDACTED} next%20word"),
        ("u=https%3A%2F%2Fme%3Apass%40host%2Fx%20y", f"u=https://{REDACTED}@host/x%20y"),
        ("/data/\udcff/x%3Ftoken%3DaB3aB3", rf"/data/\udcff/x?token={REDACTED}"),  # a path that is not UTF-8
    ],
)
def test_a_percent_encoded_secret_is_redacted(text: str, shown: str) -> None:
    assert redact_text(text) == shown


def test_a_configuration_printed_as_yaml_shows_no_key() -> None:
    text = "storage:\n  account: me\n  account_key: aB3+/aB3aB3aB3aB3==\n  client_secret: aB3~aB3aB3aB3aB3\n"
    shown = f"storage:\n  account: me\n  account_key: {REDACTED}\n  client_secret: {REDACTED}\n"
    assert redact_text(text) == shown


@pytest.mark.parametrize(
    "token",
    [
        "glpat-" + "aB3_x" * 4,
        "glpat-" + "aB3_x" * 6 + ".01.0w1234567",
        "glpat-" + "aB3_x" * 4 + ".01.abc",
        "ASIA" + "A1" * 8,
        "AIza" + "b" * 35,
        "npm_" + "a1" * 18,
        "nvapi-" + "x1" * 20,
        "SG." + "a" * 22 + "." + "b" * 43,
        "dckr_pat_" + "x" * 27,
        "sk_live_" + "a" * 24,
    ],
)
def test_more_tokens_of_well_known_shape(token: str) -> None:
    assert redact_text(f"with {token}, then") == f"with {REDACTED}, then"


@pytest.mark.parametrize(
    "text",
    [
        "loss 8.3144 | LR: 1.00e-07 | Grad Norm: 1.7089",
        "commit 3f786850e387550fdab836ed7e6dc881de23001b",
        "sorted(items, key=len)  # num_tokens=1024 pad_token_id=0 max_tokens=7",
        "/data/keys/part-00001.bin?split=train&x=1",
        "signature=inspect.signature(forward)",
        "password=getpass.getpass(), token=None, api_key=os.environ['X'], password=None",
        "killed with sig=9",
        "signature: torch.nn.modules.linear.Linear.forward",
        "the signature, as_documented_in_the_manual",
        "50%25 of https%3A%2F%2Fhost%2Fa%20b?x=%3D1 is 100%",
        "def login(password: str, token: str) -> None:",
        "KeyError: 'token'",
        "the author's tokenizer: bytes, cookie: none",
        "model-00001-of-00002.safetensors sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "bearer of bad news",
        "wrong password: try again in 30 seconds",
        "authorization failed: ask the owner",
    ],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert redact_text(text) == text


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
        "import json; from model_check.record.environment import snapshot_environment as s; import torch;"
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
    assert seen["cpu_count"] == os.cpu_count() >= seen["cores"] >= 1 and seen["memory_bytes"] > 0
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
