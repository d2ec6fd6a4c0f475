"""The `dsv4` command: registers the subcommands (one file or folder each) and ends errors politely."""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from dsv4 import __version__
from dsv4.cli.audit import audit_command
from dsv4.cli.bench import bench_app
from dsv4.cli.chat import chat_command
from dsv4.cli.eval import eval_command
from dsv4.cli.generate import generate_command
from dsv4.cli.info import info_command
from dsv4.cli.plan import plan_command
from dsv4.cli.quantize import quantize_command
from dsv4.cli.render import render_command
from dsv4.cli.replay import replay_command
from dsv4.cli.selftest import selftest_command
from dsv4.cli.serve.command import serve_command
from dsv4.cli.stored.cache import cache_app
from dsv4.cli.stored.kernels import kernels_app
from dsv4.cli.synth import synth_command
from dsv4.dist.errors import RankFailed
from dsv4.loader.shipped import shipped_names
from dsv4.request import RequestError
from dsv4.tools.option_names import FOREIGN_OPTIONS, error_text


class Command(TyperCommand):
    """A command that knows other servers' names of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for word in args[: args.index("--") if "--" in args else None]:
            name = word.partition("=")[0]
            if name not in own and name in FOREIGN_OPTIONS:
                raise RequestError(f"{name} is another server's option: {FOREIGN_OPTIONS[name]}")
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="dsv4",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "quantize": quantize_command,
    "audit": audit_command,
    "chat": chat_command,
    "eval": eval_command,
    "generate": generate_command,
    "info": info_command,
    "plan": plan_command,
    "render": render_command,
    "replay": replay_command,
    "selftest": selftest_command,
    "serve": serve_command,
    "synth": synth_command,
}


def _summary(command: Callable[..., None]) -> str:
    """The first sentence of a command's text, whole: the library would cut it at the width of the terminal."""
    return (command.__doc__ or "").split("\n")[0]


app.add_typer(bench_app, name="bench")
app.add_typer(cache_app, name="cache")
app.add_typer(kernels_app, name="kernels")
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=Command, short_help=_summary(_command))(_command)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"dsv4 {__version__}")
        raise typer.Exit


@app.callback(
    help=f"""DeepSeek-V4 inference with bit-exact results.

    A model is named the same way everywhere: a checkpoint folder, a name on the hub (ORG/NAME, downloaded once), or
    the name of a shipped one ({", ".join(shipped_names())}). Where no weights are needed, flash, pro and tiny name
    the published architectures.
    """
)
def dsv4(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """What every command has."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; the process's own arguments unless given. It always ends in `SystemExit`.

    Bad input ends with one paragraph on stderr and exit code 2, never with a traceback; a failed rank with code 1.
    """
    try:
        app(arguments)
    except (ValueError, OSError) as error:
        print(f"dsv4: error: {error_text(error)}", file=sys.stderr)
        sys.exit(2)
    except RankFailed as error:
        print(f"dsv4: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
