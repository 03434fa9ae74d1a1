"""``weight-sync follow``: keeps a checkpoint folder current, for any engine that can load one.

Owns the waiting, the signals and what is told. Owns no folder (mirror.py) and no reload (the engine ``checkpoint``).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.failure import INTERRUPTED
from weight_sync.cli.options import Common, Uri, history_of, reader
from weight_sync.cli.output import Output, seconds
from weight_sync.errors import VersionNotReadyError, WeightSyncError

if TYPE_CHECKING:
    from weight_sync.config import Config
    from weight_sync.replica import Replica, SyncReport

__all__ = ["follow"]


def follow(
    common: Common,
    uri: Uri,
    out: Annotated[str, typer.Option(metavar="DIR", help="Becomes a link to the folder of the newest version.")],
    on_commit: Annotated[
        str | None, typer.Option(metavar="CMD_OR_URL", help="Reloads the engine: a shell command, or a URL to POST to.")
    ] = None,
    check: Annotated[
        str | None, typer.Option(metavar="CMD_OR_URL", help="Tells whether the engine serves; a URL is asked with GET.")
    ] = None,
    check_contains: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What the answer of --check must hold: {version} or {digest} in it."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Bring the folder to the newest version, then end.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="With --once: longest wait for a first version.")
    ] = None,
) -> None:
    """Keeps DIR a Hugging Face checkpoint of the newest version: safetensors, configuration, tokenizer. Of a run of
    adapters: a folder of PEFT's, adapter_model.safetensors and adapter_config.json.

    DIR is switched with one rename, so a reader never sees half a version, and each version's digest is checked before.
    Then --on-commit runs, with WEIGHT_SYNC_PATH, _RUN_ID, _VERSION and _DIGEST set (a URL gets them as JSON); when it
    fails, DIR and the engine go back to the version before, and the command ends with 7. A store that cannot be reached
    is tried again. Ends at Ctrl-C or SIGTERM, leaving DIR as it is.

        weight-sync follow /shared/run --out /models/current --once
        weight-sync follow s3://bucket/run --out /models/current \\
            --base /models/base --on-commit http://localhost:8000/reload
    """
    config = common.config(uri)
    options = {"on_commit": on_commit, "check": check, "check_contains": check_contains, "threads": config.threads}
    if once:
        _once(common.out, config, out, options, config.timeout_s if timeout is None else timeout)
    else:
        _forever(common.out, config, out, options)


def _once(out: Output, config: Config, folder: str, options: dict[str, Any], limit: float) -> None:
    deadline = time.monotonic() + limit
    with reader(config) as end:
        if end.head() is None and limit:  # asks, and so tells at once who may not
            out.note(f"waiting for the first version of {config.uri}, {limit:g} s at most")
        if end.wait(None, limit) is None:  # the first version tells the base
            raise VersionNotReadyError("the store holds no version yet", field="uri", found=config.uri,
                                       do="start the trainer, or wait longer")  # fmt: skip
        base = history_of(end, config).resolve_base(None)
    with _replica(config, folder, {**options, "base": base}) as replica:
        _tell(out, folder, replica.sync(timeout=max(0.0, deadline - time.monotonic())), replica.run_id)


def _forever(out: Output, config: Config, folder: str, options: dict[str, Any]) -> None:
    with _stopping() as stop:
        base = _await_base(config, out, stop)
        if not stop.is_set():
            with _replica(config, folder, {**options, "base": base}) as replica:
                notes = _Notes(out)

                def told(report: SyncReport) -> None:
                    notes.last = ""
                    _tell(out, folder, report, replica.run_id)

                replica.follow(told, stop, notes.error)
    raise typer.Exit(stop.code)


def _await_base(config: Config, out: Output, stop: threading.Event) -> str | None:
    """The base's folder here, once there is a version that names it; its other files go beside the weights."""
    with reader(config) as end:
        if end.head() is None:
            out.note(f"waiting for the first version of {config.uri}")
        while not stop.is_set() and end.wait(None, 1.0) is None:
            continue
        if stop.is_set():
            return None
        base = history_of(end, config).resolve_base(None)
        head = end.head()
        if head is not None and end.manifest(head).HasField("adapter"):
            return None  # an adapter's folder has no other files
    if base is None:
        out.note("the base is not here: give --base, or configuration and tokenizer files will be missing")
    return base


@contextmanager
def _replica(config: Config, folder: str, options: dict[str, Any]) -> Iterator[Replica]:
    """A replica that drives a checkpoint folder; both closed in the end."""
    from weight_sync.registry import find
    from weight_sync.replica import Replica

    engine = find("engines", "checkpoint")(folder, **options)
    try:
        with Replica.open(config, engine) as replica:
            yield replica
    finally:
        engine.close()


# --- stopping ---


class _Stop(threading.Event):
    """Set by a signal; ``code`` is the exit code that goes with it."""

    code = INTERRUPTED


@contextmanager
def _stopping() -> Iterator[_Stop]:
    """The first SIGINT or SIGTERM asks for an end between two versions, the second one ends at once."""
    stop = _Stop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: object) -> None:
        stop.code = 128 + number
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- telling ---


class _Notes:
    """Errors that may pass, each told once in a row."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self.last = ""

    def error(self, error: WeightSyncError) -> None:
        """Tells about an error unless it is the last one again."""
        if str(error) != self.last:
            self.last = str(error)
            self._out.note(f"trying again: {error}")


def _tell(out: Output, folder: str, report: SyncReport, run_id: str | None) -> None:
    row = {
        "run_id": run_id,
        "version": report.version,
        "previous": report.previous,
        "changed": report.changed,
        "staleness": report.staleness,
        "path": report.path,
        "digest": report.digest,
        "seconds": dict(report.seconds),
        "ack_error": report.ack_error,
        "out": folder,
    }

    def show() -> None:
        took = f"{seconds(report.seconds['total'])}, paused {seconds(report.pause_s)}"
        out.text(f"{folder}: version {report.version} ({report.path}), {took if report.changed else 'no change'}")

    out.result(row, show)
    if report.ack_error:
        out.note(f"the trainer could not be told: {report.ack_error}")
