"""What is said of a block of keys that is refused.

Owns the words. Owns no key and no check (config.py, blocks.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import get_args

from pydantic import BaseModel, ValidationError

from weight_sync.errors import ConfigError

__all__ = ["refusal"]


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Names of keys, those of nested blocks with dots."""
    for name, info in model.model_fields.items():
        yield prefix + name
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _all_keys(info.annotation, f"{prefix}{name}.")


def _siblings(model: type[BaseModel], where: Sequence[int | str]) -> list[str]:
    """The keys that may stand where an unknown one does, with the names of the blocks around them."""
    for part in where[:-1]:
        kind = model.model_fields[part].annotation if isinstance(part, str) else None
        inner = next((k for k in (kind, *get_args(kind)) if isinstance(k, type) and issubclass(k, BaseModel)), None)
        model = inner or model
    prefix = "".join(f"{part}." for part in where[:-1])
    return list(_all_keys(model, prefix))


_EXPECTED = {
    "tuple_type": "a list", "model_type": "a block of keys", "dict_type": "key: value lines", "int_parsing": "a number",
    "int_type": "a number", "float_parsing": "a number", "float_type": "a number", "int_from_float": "a whole number",
    "bool_parsing": "true or false", "bool_type": "true or false", "string_type": "text",
}  # fmt: skip
"""By pydantic's type of an error: what it would say in words of Python."""


def refusal(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """Names the key; of an unknown one the nearest that may stand there, of a bad value what is expected."""
    found = error.errors()
    # a misspelt key often is why another one is missing
    first = next((item for item in found if item["type"] == "extra_forbidden"), found[0])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _siblings(model, first["loc"]), n=1, cutoff=0.0)
        return ConfigError(
            "unknown key",
            field=f"weight_sync.{key}",
            expected=near[0] if near else "a listed key",
            do="weight-sync config lists all keys",
        )
    if first["type"] == "missing":
        return ConfigError("missing key", field=f"weight_sync.{key}", do="set it in the weight_sync block")
    expected = _EXPECTED.get(first["type"]) or first["msg"].removeprefix("Value error, ").removeprefix(
        "Input should be "
    )
    return ConfigError("bad value", field=f"weight_sync.{key}", found=first["input"], expected=expected,
                       do="weight-sync config lists all keys with their defaults and meaning")  # fmt: skip
