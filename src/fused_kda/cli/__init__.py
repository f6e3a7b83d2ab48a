"""The ``fused-kda`` command: generate, eval, check, bench, bench-model, doctor, inspect, build, cache.

Every command prints for a person, or with ``--json`` one JSON document for a program. Exit codes: 0 done, 1 a check
failed or a figure was below the one asked for, 2 the command line cannot be carried out.
"""

from __future__ import annotations

import typer

from .. import gates
from . import bench, bench_model, build, cache, check, doctor, inspect, model
from .terminal import stop

app = typer.Typer(
    name="fused-kda",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """One decode step of a Kimi Delta Attention layer in one kernel launch."""
    try:
        gates.settings()
        gates.prebuilt_sets()
    except ValueError as error:
        stop(str(error))


app.command("generate")(model.generate_command)
app.command("eval")(model.eval_command)
app.command("bench")(bench.command)
app.command("bench-model")(bench_model.command)
app.command("check")(check.command)
app.command("doctor")(doctor.command)
app.command("inspect")(inspect.command)
app.command("build")(build.command)
app.add_typer(cache.app, name="cache")
