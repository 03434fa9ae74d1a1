"""``weight-sync config``: the configuration keys, once, from the model that checks them.

Owns the command. Owns no key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weight_sync.cli.options import Common
from weight_sync.cli.output import Output

__all__ = ["config"]


def config(common: Common) -> None:
    """Lists every weight_sync key with its default and its meaning; with --config or --set, the values in force.

    The same block stands in every host's configuration, in files given as --config, and in --set KEY=VALUE.

        weight-sync config
        weight-sync config --config train.yaml

    The second one checks the file: an unknown key is an error that names the nearest one.
    """
    from weight_sync.config import Config

    chosen = common.file is not None or bool(common.keys) or bool(common.store_options)
    uri = None if common.file is not None else ""
    values = common.config(uri).model_dump(mode="json") if chosen else {}
    if chosen:
        from weight_sync.registry import find, names

        if values["backend"] not in names("transports"):
            find("transports", values["backend"])  # raises, with the names that there are
    if chosen and uri is not None:
        del values["uri"]  # nobody gave one
    rows: list[dict[str, Any]] = []
    for name, field, default in _fields(Config):
        row = {
            "key": name,
            "type": _type_name(field.annotation),
            "required": field.is_required(),
            "default": None if field.is_required() else _plain(default),
            "help": field.description or "",
        }
        block, _, inner = name.partition(".")
        if block in values:
            row["value"] = values[block][inner] if inner else values[block]
        rows.append(row)
    common.out.result({"keys": rows}, lambda: _show(common.out, rows))


def _fields(model: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, field and default of every key; those of a block within the block with a dot."""
    for name, field in model.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
        yield prefix + name, field, default
        if hasattr(field.annotation, "model_fields"):
            yield from _fields(field.annotation, f"{prefix}{name}.")


def _type_name(annotation: Any) -> str:
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for noise in ("typing.", "weight_sync.config."):
        name = name.replace(noise, "")
    return name


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    import json

    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _show(out: Output, rows: list[dict[str, Any]]) -> None:
    in_force = any("value" in row for row in rows)
    columns = ["key", "value" if in_force else "default", "meaning"]
    table = [[row["key"], "(required)" if row["required"] and "value" not in row
              else _text(row["value"] if "value" in row else row["default"]), row["help"]] for row in rows]  # fmt: skip
    out.table(columns, table)
