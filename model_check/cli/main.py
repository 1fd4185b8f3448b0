"""The `model-check` command: one verb a file. A user's mistake is one sentence and an exit code, never a traceback."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click
import typer
from typer.core import TyperGroup

from model_check.errors import ModelCheckError

# verb -> (module, function, its line in --help). Modules are imported when their verb is used: `model-check explain`
# must not wait for torch.
VERBS: dict[str, tuple[str, str, str]] = {
    "train": ("model_check.cli.train", "train", "Train a LLaMA on every GPU, or on CPU ranks where there is none."),
    "prepare": ("model_check.cli.prepare", "prepare", "Tokenize and cache the data of a configuration."),
    "gpus": ("model_check.cli.gpus", "gpus", "List the GPUs, their load, and which ones a job would take."),
    "run": ("model_check.cli.run", "run", "Run any PyTorch script under the black box."),
    "attach": ("model_check.cli.attach", "attach", "Say who waits for whom in a job that hangs right now."),
    "diagnose": ("model_check.cli.diagnose", "diagnose", "Say what happened to a run, from its directory."),
    "explain": ("model_check.cli.explain", "explain", "The long form of an error code."),
}
# Verbs whose arguments belong to somebody else's program.
_PASSING_ARGUMENTS_ON = {"run"}


class LazyVerbs(TyperGroup):
    """Loads a verb's module when it is called; the list of verbs needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, function, help_line = VERBS[cmd_name]
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        passing_on = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
        settings = passing_on if cmd_name in _PASSING_ARGUMENTS_ON else {}
        implementation = getattr(importlib.import_module(module), function)
        app.command(cmd_name, context_settings=settings, short_help=help_line)(implementation)
        return typer.main.get_command(app)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in VERBS.items()])


def _group() -> click.Command:
    app = typer.Typer(
        cls=LazyVerbs,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Train LLaMA-style models on every GPU you have, and know why when it breaks.",
    )

    @app.callback()
    def root() -> None: ...

    return typer.main.get_command(app)


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """`--max_steps=5` of the earlier guides is `--max-steps=5`; values and other programs' arguments stay as they are."""
    if arguments and arguments[0] in _PASSING_ARGUMENTS_ON:
        return list(arguments)
    fixed = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        fixed.append(flag.replace("_", "-") + equals + value if flag.startswith("--") else argument)
    return fixed


def fail(error: ModelCheckError) -> int:
    sys.stdout.flush()
    print(f"model-check: error: {error}", file=sys.stderr)
    return error.exit_code


def main(arguments: Sequence[str] | None = None) -> Any:
    """Runs the command line and exits with its code."""
    given = with_dashes(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _group().main(args=given, prog_name="model-check", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
    except ModelCheckError as error:
        sys.exit(fail(error))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
