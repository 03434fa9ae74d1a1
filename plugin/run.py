"""``python -m weight_sync.run PROGRAM ... --weight_sync.uri URI``: a trainer's own program, training through weight_sync.

Owns the ``--weight_sync.*`` options, which it takes off the command line, and running the program afterwards. Owns no
host: what has to be prepared is registered under the entry point group ``weight_sync.launchers`` by the name of the
program's package.

For hosts that have no place of their own for our block; hosts with one (verl, slime) are started as ever.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from typing import Any

from weight_sync.errors import ConfigError, WeightSyncError
from weight_sync.registry import find

__all__ = ["main", "split_options"]

_PREFIX = "--weight_sync."
_USAGE = "usage: python -m weight_sync.run PROGRAM [its options] --weight_sync.uri URI [--weight_sync.KEY VALUE ...]"


def split_options(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Our options as a block, and everything else as it was.

    Dots nest (``--weight_sync.tls.ca FILE``); lists and mappings are written as YAML (``'[step, compact]'``), null unsets;
    an option without a value is true. Raises ConfigError for one that is given twice.
    """
    block: dict[str, Any] = {}
    rest: list[str] = []
    index = 0
    while index < len(arguments):
        word = arguments[index]
        index += 1
        if not word.startswith(_PREFIX):
            rest.append(word)
            continue
        key, equals, text = word.removeprefix(_PREFIX).partition("=")
        if not equals:
            text = "true"
            if index < len(arguments) and not arguments[index].startswith("--"):
                text = arguments[index]
                index += 1
        _put(block, key, _value(text))
    return block, rest


def _value(text: str) -> Any:
    """Only what is no plain word is YAML: the keys' own types decide about everything else."""
    if text != "null" and text[:1] not in ("[", "{"):
        return text
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            "not YAML", field="value", found=text, expected="a list, a mapping or a plain word"
        ) from error


def _put(block: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = key.split(".")
    for name in outer:
        block = block.setdefault(name, {})
        if not isinstance(block, dict):
            raise ConfigError("a key is a value and a block at once", field=f"weight_sync.{key}", found=name)
    if last in block:
        raise ConfigError("option is given twice", field=f"weight_sync.{key}", found=value, expected=block[last])
    block[last] = value


def main(arguments: Sequence[str]) -> int:
    """Prepares the program's host and runs it as the main program; 2 when our part of the command line is wrong."""
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 2
    program, options = arguments[0], arguments[1:]
    try:
        block, rest = split_options(options)
        find("launchers", program.partition(".")[0])(program, block)
    except WeightSyncError as error:
        print(f"weight_sync: {error}", file=sys.stderr)
        return 2
    sys.argv = [program, *rest]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
