"""Options that every command takes, and what they add up to: a configuration, a reading end, a place to speak.

Owns their names, help and checks. Owns no command.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.output import Output
from weight_sync.errors import ConfigError, InputError, VersionMissingError

if TYPE_CHECKING:
    from weight_sync.config import Config
    from weight_sync.history import History
    from weight_sync.ports import ReplicaEnd

__all__ = ["Common", "Uri", "backend_of", "command", "help_text", "history_of", "pairs", "reader", "version_number"]

Uri = Annotated[str, typer.Argument(metavar="URI", help="The store: a folder, file:///path, s3://bucket/prefix, ...")]

_PANEL = "Common options"


@dataclass
class Common:
    """What the common options said.

    Attributes:
        file: YAML file with a ``weight_sync`` block, None without one.
        keys: configuration keys by name, of ``--view``, ``--run``, ``--base``, ``--threads`` and ``--set``.
        store_options: of ``--option``.
        out: where the command speaks.
    """

    file: Path | None = None
    keys: dict[str, Any] = field(default_factory=dict)
    store_options: dict[str, str] = field(default_factory=dict)
    out: Output = field(default_factory=Output)

    def config(self, uri: str | None, **keys: Any) -> Config:
        """The configuration for ``uri`` (None: as the file says); ``keys`` win over options, options over the file.

        Raises ConfigError that names the key.
        """
        from weight_sync import config as configuration

        chosen = {**self.keys, **keys}
        if uri is not None:
            chosen["uri"] = uri
            if "backend" not in chosen and self.file is None:
                chosen["backend"] = backend_of(uri)
        config = configuration.load({} if self.file is None else self.file, **chosen)
        if self.store_options:
            config = config.replace(store_options={**config.store_options, **self.store_options})
        return config


def backend_of(uri: str) -> str:
    """The transport that is named like the scheme, else the one that a configuration would mean by it."""
    from weight_sync.config import load
    from weight_sync.registry import names

    scheme = uri.partition("://")[0]
    return scheme if "://" in uri and scheme in names("transports") else load({"uri": uri}).backend


@contextmanager
def reader(config: Config) -> Iterator[ReplicaEnd]:
    """A reading end of the configured store, closed in the end."""
    from weight_sync.registry import open_transport

    end = open_transport(config).replica_end(config.run_id)
    try:
        yield end
    finally:
        end.close()


def history_of(end: ReplicaEnd, config: Config, progress: Callable[[int, int], None] | None = None) -> History:
    """The versions of the configured view."""
    from weight_sync.history import History
    from weight_sync.signing import checker

    return History(end, config.view, config.threads, config.base, progress, checker(config.signing))


def version_number(end: ReplicaEnd, text: str) -> int:
    """A number, or ``head``. Raises InputError, and VersionMissingError when the run has no version."""
    if text != "head":
        if not (text.isascii() and text.isdigit()):
            raise InputError("not a version", field="version", found=text, expected="a number, or head")
        return int(text)
    head = end.head()
    if head is None:
        raise VersionMissingError("the run has no version yet", field="version", found="head", do="publish one")
    return head


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` words as a mapping. Raises ConfigError for other words, and for a name that is given twice."""
    found: dict[str, str] = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError("not a pair", field=option, found=word, expected="KEY=VALUE")
        if key in found:
            raise ConfigError("a name is given twice", field=option, found=key, expected="once", do="keep one of them")
        found[key] = value
    return found


def _settings(given: Sequence[str]) -> dict[str, Any]:
    """``--set`` words; values are read as YAML, so that numbers, true and [lists] mean what they do in a file."""
    if not given:
        return {}
    import yaml

    found: dict[str, Any] = {}
    for key, value in pairs("--set", given).items():
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError("not a YAML value", field=f"--set {key}", found=value) from error
    return found


def _options(
    view: Annotated[str | None, typer.Option(help="Name of the served view.", rich_help_panel=_PANEL)] = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN_ID", help="The run; default: the newest.", rich_help_panel=_PANEL)
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where the run's base checkpoint lies here.", rich_help_panel=_PANEL),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file with a weight_sync block.", rich_help_panel=_PANEL),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", rich_help_panel=_PANEL,
                     help="Any key that `weight-sync config` lists; may be repeated."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", rich_help_panel=_PANEL,
                     help="Option of the object store: endpoint, region, ...; may be repeated."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=256, help="Threads of the codec.", rich_help_panel=_PANEL)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON on stdout.", rich_help_panel=_PANEL)] = False,
) -> Common:  # fmt: skip
    given = {"view": view, "run_id": run, "base": base, "threads": threads}
    keys = _settings(set_ or ()) | {key: value for key, value in given.items() if value is not None}
    return Common(config, keys, pairs("--option", option or ()), Output(json))


def help_text(doc: str) -> str:
    """A docstring as typer draws it best: prose flows, indented examples stay as they are, nothing is markup."""
    paragraphs = inspect.cleandoc(doc).split("\n\n")
    flowing = [text if text.startswith("    ") else text.replace("\n", " ") for text in paragraphs]
    return re.sub(r"\[(?=[a-z#/@])", r"\\[", "\n\n".join(flowing))


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command that takes the common options, too: its first parameter is the `Common` that they make."""
    mine = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    common = inspect.signature(_options, eval_str=True).parameters
    added = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in common.values()]

    @functools.wraps(function)
    def run(**given: Any) -> None:
        common_values = {name: given.pop(name) for name in common}
        function(_options(**common_values), **given)

    everything = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in mine] + added
    run.__doc__ = help_text(function.__doc__ or "")
    run.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in everything}
    return run
