"""`--config FILE.toml`: the command's options in a file, and `--print-config`, which writes one. No torch.

    model = "deepseek-ai/DeepSeek-V4-Flash"
    context = 131072
    allowed-host = ["api.example.org"]

The command line wins over the environment, and that over the file. Secrets stand in neither: they come from the
environment.
"""

import difflib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from dsv4.config import ConfigError, shown

NOT_IN_FILES = ("config_file", "print_config", "help", "model_option")
SECRETS = {"api_key": "DSV4_API_KEY", "ssl_keyfile_password": "DSV4_SSL_KEYFILE_PASSWORD"}


def load_options(context: typer.Context, path: Path | None) -> Path | None:
    """The file's values as the command's defaults; called before any other option is looked at."""
    if path is None or context.resilient_parsing:
        return path
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    known = {_name(one): one for one in options(context.command)}
    values = {}
    for name, value in found.items():
        field = name.replace("-", "_")
        if field in SECRETS:
            raise ConfigError(f"--config {path}: {name} is a secret: set {SECRETS[field]} in the environment")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"options: {', '.join(known)}"
            raise ConfigError(f"--config {path}: there is no option {name!r}; {hint}")
        values[known[name].name] = _checked(_kinds(context, known[name].name), value, f"--config {path}: {name}")
    context.default_map = {**(context.default_map or {}), **values}
    return path


def options(command: Any) -> list[Any]:
    """What a file can hold: every option, and the model."""
    return [one for one in command.params if one.name not in (*NOT_IN_FILES, *SECRETS)]


def options_text(context: typer.Context) -> str:
    """Every option with its value, as a file; what has none is a comment. Read back, it means the same."""
    return "\n".join(_lines(context)) + "\n"


def _lines(context: typer.Context) -> Iterator[str]:
    for one in options(context.command):
        value = context.params.get(one.name)
        help_text = " ".join((getattr(one, "help", None) or "").split())
        if help_text:
            yield f"# {help_text}"
        yield f"# {_name(one)} =" if value is None or value == () else f"{_name(one)} = {_toml(value)}"
        yield ""


def _name(one: Any) -> str:
    """As on the command line, without the dashes."""
    name: str = max(one.opts, key=len)
    return name.removeprefix("--")


def _kinds(context: typer.Context, name: str) -> set[type]:
    """The types of one of the command's arguments."""
    hint = get_type_hints(inspect.unwrap(context.command.callback or load_options))[name]
    return {kind for one in (hint, *get_args(hint)) for kind in (one, *get_args(one)) if isinstance(kind, type)} | (
        {list} if "list[" in str(hint) else set()
    )


def _checked(kinds: set[type], value: Any, place: str) -> Any:
    """`ConfigError` for a value of another type than the option has."""
    if list in kinds:
        if not isinstance(value, list):
            raise ConfigError(f"{place} must be a list, found {shown(value)}")
        return [_checked(kinds - {list}, item, place) for item in value]
    if bool in kinds:
        fits, what = isinstance(value, bool), "true or false"
    elif float in kinds:
        fits, what = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif int in kinds:
        fits, what = type(value) is int, "a whole number"
    else:
        fits, what = isinstance(value, str) or type(value) is int, "text"  # `drafts = 3` as on the command line
    if not fits:
        raise ConfigError(f"{place} must be {what}, found {shown(value)}")
    return value if kinds & {bool, float, int} else str(value)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    escaped = "".join(sign if sign.isprintable() else f"\\u{ord(sign):04x}" for sign in text)
    return f'"{escaped}"'
