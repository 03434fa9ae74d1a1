"""The facts that an engine's rank tells about itself, as a contract.

Owns the reading of text. Owns no fact: a rank's host fills them in from what it runs with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weight_sync.contract import FIELDS, from_document
from weight_sync.contract.message import kind_of
from weight_sync.proto.v1 import contract_pb2

__all__ = ["contract_of"]

_MAPS = ("kernel_versions", "sampling")


def contract_of(kind: str, facts: Mapping[str, str]) -> contract_pb2.ExecutionContract:
    """Of an engine of this kind, sealed.

    Args:
        facts: fields of the contract as text, those of the two maps with a dot; ``torch`` stands for its kernel version,
            ``dtype`` for what is computed in, and for what is served where ``served_format`` is not told. Other keys, and
            empty texts, say nothing.

    Raises ConfigError for a text that is no value of its field.
    """
    known = {name: text for name, text in facts.items() if text}
    document: dict[str, Any] = {"engine": kind, **{name: {} for name in _MAPS}}
    if "torch" in known:
        document["kernel_versions"]["torch"] = known["torch"]
    if "dtype" in known:
        document |= {"compute_dtype": known["dtype"], "served_format": known["dtype"]}
    for name, text in known.items():
        outer, dot, inner = name.partition(".")
        if dot and outer in _MAPS:
            document[outer][inner] = text
        elif name in FIELDS:
            document[name] = _value(name, text)
    return from_document(document, f"{kind}'s facts")


def _value(name: str, text: str) -> Any:
    kind = kind_of(name)
    if kind is bool and text in ("true", "false"):
        return text == "true"
    return int(text) if kind is int and text.isdigit() else text
