"""The `dsv4` command: registers the subcommands (one `*_command.py` each) and ends errors politely."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from dsv4.serve.bench_command import bench_app
from dsv4.serve.chat_command import chat_command
from dsv4.serve.eval_command import eval_command
from dsv4.serve.generate_command import generate_command
from dsv4.serve.info_command import info_command
from dsv4.serve.plan_command import plan_command
from dsv4.serve.render_command import render_command
from dsv4.serve.serve_command import serve_command
from dsv4.serve.synth_command import synth_command

app = typer.Typer(
    name="dsv4",
    help="DeepSeek-V4 inference people can trust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench")
app.command("chat")(chat_command)
app.command("eval")(eval_command)
app.command("generate")(generate_command)
app.command("info")(info_command)
app.command("plan")(plan_command)
app.command("render")(render_command)
app.command("serve")(serve_command)
app.command("synth")(synth_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; the process's own arguments unless given. It always ends in `SystemExit`.

    Bad input ends with one paragraph on stderr and exit code 2, never with a traceback.
    """
    try:
        app(arguments)
    except (ValueError, OSError) as error:
        print(f"dsv4: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
