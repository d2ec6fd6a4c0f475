"""`dsv4 kernels`: compiled kernels from one machine to another with the same kind of GPU. Needs no model."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsv4.config import ConfigError

kernels_app = typer.Typer(help="Carry compiled kernels from machine to machine.", no_args_is_help=True)
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The file, e.g. kernels.tar.xz.")]
CacheOption = Annotated[
    Path | None, typer.Option(help="Triton's cache. Default: TRITON_CACHE_DIR, else ~/.triton/cache.")
]


@kernels_app.command("pack")
def pack_command(file: FileArgument, cache: CacheOption = None) -> None:
    """Put the kernels that were compiled on this machine into one file."""
    from dsv4.tools.kernel_archive import default_cache, pack

    _need_triton()
    source = default_cache() if cache is None else cache
    done = pack(source, file)
    print(f"{done.num_kernels} kernels of {source} in {file}, {done.num_bytes:,} bytes")


@kernels_app.command("unpack")
def unpack_command(file: FileArgument, cache: CacheOption = None) -> None:
    """Put the kernels of a file where this machine finds them, if its Triton can: a first start then compiles nothing.

    Take files only from where you would take programs: a kernel can do on the GPU what it likes.
    """
    from dsv4.tools.kernel_archive import default_cache, unpack

    _need_triton()
    if not file.is_file():
        raise ConfigError(f"{file} does not exist")
    target = default_cache() if cache is None else cache
    done = unpack(file, target)
    print(f"{done.num_kernels} kernels into {target}, {done.num_bytes:,} bytes")
    if done.note:
        Console(stderr=True).print(f"dsv4: note: {done.note}", markup=False, highlight=False, soft_wrap=True)


def _need_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("dsv4 kernels needs Triton, which is not installed here")
