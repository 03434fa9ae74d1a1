"""The command line ``weight-sync``.

Owns the list of commands, and how a failure ends the process: one line, an exit code by branch of the error tree, no
traceback. Owns no work: each command is a module here, and imports what is heavy (torch, kernels, stores) when it
runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import errno
import signal
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from weight_sync.cli import (
    config,
    contract,
    diff,
    doctor,
    fold,
    follow,
    forecast,
    gc,
    inspect,
    log,
    materialize,
    plan,
    publish,
    serve,
    sidecar,
    status,
    verify,
    warm,
)
from weight_sync.cli.failure import FAILED, INTERRUPTED, USAGE, describe, exit_code
from weight_sync.cli.options import command, help_text
from weight_sync.cli.output import Output
from weight_sync.errors import InputError, WeightSyncError

__all__ = ["app", "main"]

_UsageError: Any = typer.BadParameter.__base__  # typer brings its own click or uses the one installed
_EXIT_CODES = """Exit codes: 0 done; 1 failed in another way; 2 wrong command line or input; 3 bytes are not what was
written; 4 the version is not there, or not yet; 5 another line of history; 6 the store failed; 7 the engine failed;
130 interrupted; 143 terminated."""


class _Terminated(BaseException):
    """SIGTERM arrived; unwinds like an interruption, so that temporary files go."""


class _Cli(TyperGroup):
    """Turns failures of any command into a line, JSON on request, and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = {"json": "--json" in args}
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        out = Output(ctx.obj["json"])
        try:
            return super().invoke(ctx)
        except WeightSyncError as error:
            _fail(out, error, exit_code(error))
        except _UsageError as error:
            if not out.json:
                raise  # typer draws it, with the command's usage
            _fail(out, InputError(error.format_message(), do=f"see {error.ctx.command_path} --help"), USAGE)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read our output has gone
            _fail(out, error, FAILED)
        except KeyboardInterrupt:
            out.note("interrupted")
            raise typer.Exit(INTERRUPTED) from None


def _fail(out: Output, error: Exception, code: int) -> NoReturn:
    out.note(f"weight-sync: {error}")
    if out.json:
        out.line({"error": describe(error, code)})
    raise typer.Exit(code) from error


app = typer.Typer(
    cls=_Cli, no_args_is_help=True, add_completion=True, rich_markup_mode="rich", pretty_exceptions_enable=False
)


def _version(wanted: bool) -> None:
    if wanted:
        from weight_sync import __version__

        print(__version__)
        raise typer.Exit()


@app.callback(
    epilog=help_text(_EXIT_CODES),
    help=help_text("""Moves a policy's weights from a trainer to rollout engines, exactly, with versions.

    A store holds runs; a run is a log of versions; a version is a set of tensors known bit for bit. Each command has
    its own --help with examples, and --json for programs."""),
)
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


for function in (
    publish.publish, follow.follow, sidecar.sidecar, serve.serve, serve.relay, status.status, materialize.materialize,
    inspect.inspect, log.log, diff.diff, verify.verify, fold.fold, gc.gc, plan.plan, config.config, doctor.doctor,
    forecast.forecast, warm.warm,
):  # fmt: skip
    app.command()(command(function))


app.add_typer(contract.app, name="contract")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(ctx: typer.Context) -> None:
    """Measures the codec, the digest, and how sparse real updates are."""
    try:
        from weight_sync.cli.bench import app as benchmarks
    except ImportError as error:
        raise InputError(
            "the benchmarks cannot be imported", field=error.name, do="pip install 'weight-sync[bench]'"
        ) from error
    typer.main.get_command(benchmarks).main(ctx.args, prog_name="weight-sync bench", standalone_mode=False)


def main() -> None:
    """The console script."""

    def terminate(number: int, frame: object) -> NoReturn:
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        app()
    except _Terminated:
        sys.exit(128 + signal.SIGTERM)
