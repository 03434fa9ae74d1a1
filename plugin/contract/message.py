"""Contracts as facts: field names and values as text, the id over them, and the document that people write and read.

Owns the spelling. Owns no rule (terms.py) and no measuring (facts.py). Unset fields are facts that nobody knows, which
is another thing than 0, false or "".
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from weight_sync.errors import ConfigError
from weight_sync.proto.v1 import contract_pb2

__all__ = ["FIELDS", "check_field", "contract_id", "document", "facts", "from_document", "kind_of", "seal"]

Contract = contract_pb2.ExecutionContract
_MAPS = ("kernel_versions", "sampling")
FIELDS: tuple[str, ...] = tuple(f.name for f in Contract.DESCRIPTOR.fields if f.name != "id")
"""Fields of a contract; those of ``kernel_versions`` and ``sampling`` are named with a dot: ``sampling.top_k``."""

_BYTES = 16  # of the hash


def check_field(name: str, where: str) -> str:
    """``name`` when it is a field of contracts. Raises ConfigError that names the nearest one."""
    outer, dot, inner = name.partition(".")
    if name in FIELDS and outer not in _MAPS:
        return name
    if outer in _MAPS and dot and inner:
        return name
    near = difflib.get_close_matches(name, [f"{f}.NAME" if f in _MAPS else f for f in FIELDS], n=1, cutoff=0.0)
    raise ConfigError("no such field of a contract", field=f"{where}.{name}", expected=near[0] if near else FIELDS)


def kind_of(name: str) -> type:
    """bool, int or str: what the values of a field are."""
    if "." in name:
        return str
    found: dict[int, type] = {8: bool, 13: int, 9: str}  # protobuf's numbers of TYPE_BOOL, _UINT32 and _STRING
    return found[Contract.DESCRIPTOR.fields_by_name[name].type]


def facts(contract: contract_pb2.ExecutionContract) -> dict[str, str]:
    """What is known, as text, by field; sorted, without the id."""
    out: dict[str, str] = {}
    for field, value in contract.ListFields():
        if field.name == "id":
            continue
        if field.name in _MAPS:
            out |= {f"{field.name}.{key}": value[key] for key in value}
        else:
            out[field.name] = str(value).lower() if isinstance(value, bool) else str(value)
    return dict(sorted(out.items()))


def contract_id(contract: contract_pb2.ExecutionContract) -> str:
    """32 hexadecimal digits: equal exactly when all facts are. "" for a contract that says nothing."""
    known = facts(contract)
    if not known:
        return ""
    text = json.dumps(known, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return blake3(text.encode()).hexdigest(_BYTES)


def seal(contract: contract_pb2.ExecutionContract) -> contract_pb2.ExecutionContract:
    """A copy with its id, whatever id it had."""
    out = Contract()
    out.CopyFrom(contract)
    out.id = contract_id(contract)
    return out


def document(contract: contract_pb2.ExecutionContract) -> dict[str, Any]:
    """As JSON has it: typed values, the two maps as objects, the id of the facts; `from_document` reads it."""
    out: dict[str, Any] = {"id": contract_id(contract)}
    for field, value in contract.ListFields():
        if field.name != "id":
            out[field.name] = dict(sorted(value.items())) if field.name in _MAPS else value
    return out


def from_document(given: Mapping[str, Any], where: str = "contract") -> contract_pb2.ExecutionContract:
    """The contract that a document describes, sealed. Raises ConfigError that names the field, also for a wrong id."""
    out = Contract()
    for name, value in given.items():
        if name == "id":
            continue
        if name in _MAPS:
            if not isinstance(value, Mapping):
                raise ConfigError("not a mapping", field=f"{where}.{name}", found=value, expected="name: text")
            getattr(out, name).update({str(key): str(inner) for key, inner in value.items()})
            continue
        kind = kind_of(check_field(name, where))
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 32):
            raise ConfigError("not a value of this field", field=f"{where}.{name}", found=value, expected=kind.__name__)
        setattr(out, name, value)
    sealed = seal(out)
    if "id" in given and given["id"] != sealed.id:
        raise ConfigError("the id is not that of the facts", field=f"{where}.id", found=given["id"], expected=sealed.id,
                          do="leave the id out")  # fmt: skip
    return sealed
