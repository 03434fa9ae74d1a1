"""What a command says: its result on stdout, everything else on stderr.

Owns JSON, tables, progress bars and the spelling of sizes and names. Owns no command and no meaning of a number.

With ``--json`` stdout holds JSON and nothing else. Progress is drawn on stderr, and only when that is a terminal.
Names of tensors come from strangers: what cannot be printed is escaped, and nothing in them is read as markup.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Column", "Output", "printable", "seconds", "share", "size"]

_UNCUT = 4000  # columns of a table that nobody looks at on a screen
Column = str | tuple[str, str]
"""Heading of a column, or (heading, "right")."""


def printable(text: str) -> str:
    """``text`` with everything escaped that a terminal might act on.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size(count: float) -> str:
    """Bytes for people.

    >>> size(0), size(1536), size(3 << 30)
    ('0 B', '1.5 KiB', '3.0 GiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1024 or unit == "TiB":
            break
    return f"{count:.1f} {unit}"


def share(value: float) -> str:
    """A density for people.

    >>> share(0), share(0.0055), share(0.00000012), share(1)
    ('0 %', '0.55 %', '1.2e-05 %', '100 %')
    """
    return f"{100 * value:.3g} %"


def seconds(value: float) -> str:
    """A duration for people.

    >>> seconds(0.0123), seconds(12.3), seconds(4000)
    ('12 ms', '12.3 s', '1 h 6 min')
    """
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    hours, rest = divmod(int(value), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


class Output:
    """Where one command speaks; ``json`` is True when stdout is for programs."""

    def __init__(self, json: bool = False) -> None:
        self.json = json

    def result(self, document: Mapping[str, Any], show: Callable[[], object]) -> None:
        """The command's answer: the document as JSON, or whatever ``show`` prints."""
        if self.json:
            self.line(document)
        else:
            show()

    def line(self, document: Mapping[str, Any]) -> None:
        """One JSON document on a line of its own."""
        print(json.dumps(document), file=sys.stdout, flush=True)

    def text(self, line: str = "") -> None:
        """A line of an answer for people."""
        print(printable(line), file=sys.stdout, flush=True)

    def note(self, line: str) -> None:
        """A remark, on stderr."""
        print(printable(line), file=sys.stderr, flush=True)

    def facts(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Names and values, aligned."""
        width = max((len(name) for name, _ in pairs), default=0)
        for name, value in pairs:
            self.text(f"{name:<{width}}  {value}".rstrip())

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str = "") -> None:
        """A table on stdout; cut to the screen only where there is one."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
        for column in columns:
            heading, side = (column, "left") if isinstance(column, str) else column
            table.add_column(heading, justify="right" if side == "right" else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        _console(sys.stdout).print(table)

    @contextmanager
    def progress(self, title: str, unit: str = "bytes") -> Iterator[Callable[[int, int], None]]:
        """A bar while the block runs. Yields a function that takes (done, in all); several threads may call it."""
        if not sys.stderr.isatty():
            yield lambda done, total: None
            return
        from rich import progress

        amount = progress.DownloadColumn(binary_units=True) if unit == "bytes" else progress.MofNCompleteColumn()
        columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}", markup=False),
                   progress.BarColumn(), amount, progress.TimeElapsedColumn())  # fmt: skip
        lock = threading.Lock()
        shared = sys.stdout.isatty()  # then lines of the answer go above the bar; else they go where stdout goes
        drawn = progress.Progress(*columns, console=_console(sys.stderr), transient=True, redirect_stdout=shared)
        with drawn as bar:
            task = bar.add_task(printable(title), total=None)

            def update(done: int, total: int) -> None:
                with lock:
                    bar.update(task, completed=done, total=total)

            yield update


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    width = None if stream.isatty() else _UNCUT
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)
