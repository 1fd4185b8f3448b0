"""The `model-check` command: one verb a file. A user's mistake is one sentence and an exit code, never a traceback."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import gc
import importlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from model_check.cli.installation import broken_package
from model_check.cli.terminal import OutputFailed, make_output_safe
from model_check.errors import ModelCheckError, UsageError
from model_check.record.redaction import redact_text

_READER_LEFT = 128 + signal.SIGPIPE


@dataclass(frozen=True)
class Verb:
    """What a verb does. It is a function of its own name in a module of its own name, imported when it is called, so
    that help needs no torch; each of its subverbs is a function there too."""

    line: str
    subverbs: tuple[str, ...] = ()
    passes_arguments_on: bool = False
    usage: str = "[FLAGS]"


_RUN_USAGE = "[FLAGS] SCRIPT ARGS… | [FLAGS] -- COMMAND…"
_FORMS, _MEASUREMENTS = ("inspect", "verify", "convert"), ("throughput", "data", "comm", "startup")
VERBS = {
    "train": Verb("Train a LLaMA on every GPU, or on CPU ranks."),
    "prepare": Verb("Tokenize and cache the data of a configuration."),
    "plan": Verb("What a configuration needs of a GPU, and how to run it best."),
    "doctor": Verb("Say whether this machine can train, and what to mend."),
    "gpus": Verb("List the GPUs, their load, and which ones a job would take."),
    "run": Verb("Run any PyTorch script under the black box.", passes_arguments_on=True, usage=_RUN_USAGE),
    "attach": Verb("Say who waits for whom in a job that hangs right now."),
    "diagnose": Verb("Say what happened to a run, from its directory."),
    "checkpoint": Verb("Look at saved state, prove it whole, change its form: inspect, verify, convert.", _FORMS),
    "bench": Verb("Measure this machine: throughput, data, comm, startup.", _MEASUREMENTS),
    "explain": Verb("The long form of an error code."),
}


def overview() -> str:
    verbs = "\n".join(f"  {name:12s}{verb.line}" for name, verb in VERBS.items())
    return f"""\
Train LLaMA-style models on every GPU you have, and know why when it breaks.

usage: model-check VERB [flags]       model-check VERB --help

{verbs}

example: model-check train --preset debug"""


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """`--max_steps=5` of the earlier guides is `--max-steps=5`; values stay as they are."""
    fixed = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        fixed.append(flag.replace("_", "-") + equals + value if flag.startswith("--") else argument)
    return fixed


def call(name: str, arguments: Sequence[str]) -> int:
    """Runs one verb and returns its exit code; what its parser refuses is a UsageError."""
    import typer

    from model_check.cli.mistakes import ParserError, in_our_words

    verb = VERBS[name]
    module = importlib.import_module(f"model_check.cli.{name}")
    about = f"{verb.line}\n\nExample: model-check {name} {verb.subverbs[0]} --help" if verb.subverbs else None
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=about)
    settings: dict[str, Any] = {}
    if verb.passes_arguments_on:
        # The flags of the script are its own: only ours, which stand before it, may be spelled with underscores.
        settings = {
            "allow_extra_args": True,
            "allow_interspersed_args": False,
            "token_normalize_func": lambda flag: flag.replace("_", "-"),
        }
    for function in verb.subverbs or (name,):
        app.command(function, context_settings=settings, options_metavar=verb.usage)(getattr(module, function))
    given = list(arguments) if verb.passes_arguments_on else with_dashes(arguments)
    try:
        return app(given, prog_name=f"model-check {name}", standalone_mode=False) or 0
    except ParserError as error:
        raise in_our_words(error, name) from None
    except typer.Abort:
        return 130


def _unknown(name: str) -> UsageError:
    near = difflib.get_close_matches(name, VERBS, n=1)
    return UsageError(
        f"there is no verb '{name}'",
        remedy=f"did you mean {near[0]}?" if near else f"use one of {', '.join(VERBS)}",
    )


def _stand_somewhere() -> None:
    """Every path that is not absolute begins at the current folder."""
    try:
        Path.cwd()
    except OSError as error:
        said = f"the current folder cannot be used: {error.strerror}"
        raise UsageError(said, remedy="cd to one that exists") from None


def _refuse(error: ModelCheckError, code: int = 0) -> NoReturn:
    with contextlib.suppress(OutputFailed):
        sys.stdout.flush()
    try:
        print(f"model-check: error: {redact_text(str(error))}", file=sys.stderr, flush=True)
    except OSError:
        _give_up_stderr()
    sys.exit(code or error.exit_code)


def _give_up_stderr() -> None:
    """What is left in its buffer has nowhere to go; the interpreter would try once more, and exit with 120."""
    with contextlib.suppress(OSError):
        sys.stderr.close()


def _answer(given: Sequence[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if given else 2
    if given[0] in ("-V", "--version"):
        from model_check import __version__

        print(f"model-check {__version__}")
        return 0
    if given[0] not in VERBS:
        raise _unknown(given[0])
    _stand_somewhere()
    return call(given[0], given[1:])


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The command line, from the first word to the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    make_output_safe()
    # The interpreter looks through all objects once more as it ends, which with torch takes a third of a second.
    atexit.register(gc.freeze)
    code = 0
    try:
        code = _answer(given)
        sys.stdout.flush()
        sys.exit(code)
    except ModelCheckError as error:
        _refuse(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except OutputFailed as error:
        if error.reader_left:
            sys.exit(code or _READER_LEFT)
        said = f"standard output cannot be written: {error}"
        _refuse(ModelCheckError(said, remedy="free space where it goes, or send it elsewhere"), code)
    except BrokenPipeError:
        _give_up_stderr()
        sys.exit(_READER_LEFT)
    except Exception as error:
        broken = broken_package(error)
        if broken is None:
            raise
        _refuse(broken)


if __name__ == "__main__":
    main()
