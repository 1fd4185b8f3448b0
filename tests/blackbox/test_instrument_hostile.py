"""Scripts whose exceptions, words or disk would break whoever writes them down: the script must not notice."""

from __future__ import annotations

import sys

import pytest

from model_check.record import JsonlWriter, read_json, read_jsonl, write_json_atomic
from model_check.record.redaction import REDACTED, redact_text
from tests.blackbox.observed_runs import Runner

BROKEN_WORDS = (
    "class Odd(Exception):\n    def __str__(self):\n        raise ValueError('no words')\n\n"
    "def main():\n    raise Odd\n\nmain()\n"
)


def test_an_exception_that_cannot_be_shown_is_recorded_and_printed_as_without_us(run: Runner) -> None:
    seen, plain = run(BROKEN_WORDS), run(BROKEN_WORDS, inject=False)
    (event,) = seen.events("exception")
    assert (event["type"], event["user_frame"]["line"]) == ("Odd", 6) and "ValueError" in event["message"]
    assert seen.codes == plain.codes == [1]
    assert seen.errors == plain.errors


def test_words_that_utf8_cannot_hold_are_recorded_and_the_traceback_is_printed_as_without_us(run: Runner) -> None:
    text = "raise ValueError('caf\\udce9 \\ud800')"
    seen, plain = run(text), run(text, inject=False)
    (event,) = seen.events("exception")
    assert event["message"] == "caf\\udce9 \\ud800"
    assert seen.errors == plain.errors and seen.codes == [1]


def test_a_run_directory_without_room_is_not_the_scripts_trouble(run: Runner) -> None:
    seen = run(
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))\n"
        "for n in range(3):\n"
        "    try:\n        raise KeyError(n)\n"
        "    except KeyError as error:\n        print('skipped', error)\n"
        "raise ValueError('the end')\n"
    )
    assert seen.outputs == ["skipped 0\nskipped 1\nskipped 2\n"] and seen.codes == [1]
    assert seen.errors[0].endswith("ValueError: the end\n") and "excepthook" not in seen.errors[0]


@pytest.mark.parametrize(
    ("text", "code", "via", "message"),
    [
        ("raise SystemExit('no data')", 1, "SystemExit", "no data"),
        ("import sys\ntry:\n    raise SystemExit('no data')\nexcept SystemExit:\n    pass", 0, "return", None),
        ("import sys\nsys.stderr.write('words\\n')", 0, "return", None),
    ],
)
def test_the_words_of_a_raised_system_exit(run: Runner, text: str, code: int, via: str, message: str | None) -> None:
    seen = run(text)
    (event,) = seen.events("exit")
    assert (seen.codes, event["code"], event["via"], event.get("message")) == ([code], code, via, message)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
def test_the_exceptions_of_a_group_are_recorded_with_their_lines(run: Runner) -> None:
    seen = run(
        "found = []\nfor name in 'ab':\n    try:\n        {}[name]\n    except KeyError as error:\n"
        "        found.append(error)\nraise ExceptionGroup('two shards failed', found)\n"
    )
    (event,) = seen.events("exception")
    assert [(p["type"], p["message"], p["user_frame"]["line"]) for p in event["parts"]] == [
        ("KeyError", "'a'", 4),
        ("KeyError", "'b'", 4),
    ]


def test_secrets_in_the_query_of_a_url_do_not_show() -> None:
    url = "https://host.example/x?page=2&api_key=abc123&access_token=xyz#top"
    shown = f"https://host.example/x?page=2&api_key={REDACTED}&access_token={REDACTED}#top"
    assert redact_text(f"GET {url} failed; token=117 has no row") == f"GET {shown} failed; token=117 has no row"


def test_no_event_holds_the_signature_of_a_url(run: Runner) -> None:
    url = "https://host.example/x?X-Goog-Signature="
    text = (
        f"raise OSError('no', {url + 'a1' * 16!r}, {{'X-Goog-Signature': 'b2' * 16}}, 'x' * 3900, {url + 'c3' * 16!r})"
    )
    seen = run(text)
    (event,) = seen.events("exception")
    assert event["user_frame"]["text"].startswith("raise OSError('no'"), "the line is told, without its secrets"
    assert event["message"].count("X-Goog-Signature") >= 2
    assert not [secret for secret in ("a1a1", "b2b2", "c3c3") if secret in str(event)]


def test_half_a_surrogate_does_not_keep_a_record_from_its_file(tmp_path) -> None:
    writer = JsonlWriter(tmp_path / "events.jsonl")
    writer.write({"event": "one", "file": "caf\udce9.py"})
    writer.write({"event": "two"})
    writer.close()
    write_json_atomic(tmp_path / "verdict.json", {"location": "caf\udce9.py:3"})
    assert [r["event"] for r in read_jsonl(tmp_path / "events.jsonl").records] == ["one", "two"]
    assert read_json(tmp_path / "verdict.json") == {"location": "caf?.py:3"}


def test_what_atexit_prints_is_no_exit_of_the_scripts(run: Runner) -> None:
    seen = run("import atexit, sys\natexit.register(print, 'done', file=sys.stderr)\n")
    assert seen.codes == [0]
    assert [(event["code"], event["via"]) for event in seen.events("exit")] == [(0, "return")]


UNPATCHABLE = """
import pathlib, sys
pathlib.Path("mlflow.py").write_text('''
import sys, types
class Closed(types.ModuleType):
    def __setattr__(self, name, value):
        raise TypeError("this module takes no attributes")
def start_run():
    return "run"
sys.modules[__name__].__class__ = Closed
''')
sys.path.insert(0, ".")
import mlflow
print(mlflow.start_run())
"""


def test_a_module_that_cannot_be_patched_is_imported_all_the_same(run: Runner) -> None:
    seen, plain = run(UNPATCHABLE), run(UNPATCHABLE, inject=False)
    assert (seen.codes, seen.outputs) == (plain.codes, plain.outputs) == ([0], ["run\n"])
    (event,) = seen.events("recording_failed")
    assert event["what"] == "calls of mlflow" and event["error"].startswith("TypeError: ")


# A template engine's syntax error, and an exception that will not say where it comes from.
RECOVERS = """
import os
from pathlib import Path

class Odd(Exception):
    @property
    def __cause__(self):
        raise RuntimeError("no cause")

template = SyntaxError("no such tag")
template.filename, template.lineno = Path("page.tmpl"), 3
for error in (template, Odd("odd")):
    try:
        raise error
    except Exception:
        print("recovered", flush=True)
try:
    raise Odd("odd")
except Odd:
    os._exit(5)
"""


def test_a_handler_runs_on_whatever_its_exception_is_like(run: Runner) -> None:
    seen, plain = run(RECOVERS), run(RECOVERS, inject=False)
    assert (seen.codes, seen.outputs, seen.errors) == (plain.codes, plain.outputs, plain.errors)
    assert (seen.codes, seen.outputs) == ([5], ["recovered\nrecovered\n"])
    assert seen.events("recording_failed")
