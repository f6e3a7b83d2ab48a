"""``fused-kda cache``: where compiled kernels are kept between processes, and how to be rid of them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .. import gates
from ..kernels import cache
from .terminal import FAILED, console, print_json, stop

app = typer.Typer(no_args_is_help=True, help="Show or clear the cache of compiled kernels.")


def examine() -> list[dict[str, Any]]:
    """Each kind's directory, files and bytes."""
    found = []
    for kind in cache.KINDS:
        files, size = cache.contents(kind)
        found.append({"kind": kind, "directory": str(gates.settings().cache_dir / kind), "files": files, "bytes": size})
    return found


def show(found: list[dict[str, Any]]) -> None:
    """Print them, a line each."""
    for one in found:
        size = f"{one['files']} files, {one['bytes'] / 2**20:.1f} MiB" if one["files"] else "empty"
        text = f"compiled kernels of {one['kind']}: {one['directory']} ({size})"
        console.print(text, markup=False, soft_wrap=True)


@app.command("info")
def info(as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False) -> None:
    """Print the cache's directories, files and size."""
    if as_json:
        print_json(examine())
    else:
        show(examine())


@app.command("clear")
def clear() -> None:
    """Remove every compiled kernel. Running processes keep what they have loaded."""
    before = sum(one["files"] for one in examine())
    try:
        cache.clear()
    except OSError as error:
        stop(f"cache clear: {error}", FAILED)
    console.print(f"{before} files removed from {gates.settings().cache_dir}", markup=False, soft_wrap=True)
