"""What ranks are asked and what they answer: JSON objects, with digests and summaries as base64.

Owns the spelling, for both sides. Owns no meaning.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weight_sync import errors
from weight_sync.codec.digest import Digest
from weight_sync.errors import EngineError, FormatError, TensorError, WeightSyncError
from weight_sync.tensors import TensorSpec

__all__ = [
    "Reply", "decode_bytes", "decode_digests", "decode_error", "decode_table", "encode_bytes", "encode_digests",
    "encode_error", "encode_table",
]  # fmt: skip

Reply = dict[str, Any]


def encode_bytes(data: bytes) -> str:
    """As base64."""
    return base64.b64encode(data).decode("ascii")


def decode_bytes(text: Any) -> bytes:
    """From base64. Raises FormatError."""
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError) as error:
        raise FormatError("not base64", field="reply", found=str(error)) from error


def encode_digests(parts: Iterable[Digest]) -> str:
    """Both lanes of each, little-endian uint64, as base64."""
    words = [(part.lane0, part.lane1) for part in parts]
    return encode_bytes(np.array(words, "<u8").tobytes())


def decode_digests(text: Any) -> list[Digest]:
    """From `encode_digests`. Raises FormatError."""
    data = decode_bytes(text)
    if len(data) % 16:
        raise FormatError("digests end inside one", field="reply", found=len(data), expected="a multiple of 16")
    return [Digest(*pair) for pair in np.frombuffer(data, "<u8").reshape(-1, 2).tolist()]


def encode_table(table: Sequence[TensorSpec]) -> list[list[Any]]:
    """Rows of name, dtype, shape, code bits."""
    return [[spec.name, spec.dtype, list(spec.shape), spec.code_bits] for spec in table]


def decode_table(rows: Any) -> tuple[TensorSpec, ...]:
    """From `encode_table`. Raises FormatError."""
    try:
        return tuple(TensorSpec(name, dtype, tuple(shape), bits) for name, dtype, shape, bits in rows)
    except (ValueError, TypeError, TensorError) as error:
        raise FormatError("not a table of tensors", field="reply", found=str(error)) from error


def encode_error(error: Exception) -> Reply:
    """An error as a reply: nothing is ever raised through an engine's own plumbing, which may not survive it."""
    kind = type(error).__name__ if isinstance(error, WeightSyncError) else "EngineError"
    what = error.what if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
    parts = {name: getattr(error, name, None) for name in ("field", "found", "expected")}
    return {
        "error": kind, "what": what, "do": getattr(error, "do", ""),
        **{name: None if value is None else str(value) for name, value in parts.items()},
    }  # fmt: skip


def decode_error(reply: Mapping[str, Any], who: str) -> WeightSyncError:
    """What a rank raised, as an error of this process."""
    kind = getattr(errors, str(reply.get("error")), EngineError)
    if not (isinstance(kind, type) and issubclass(kind, WeightSyncError)):
        kind = EngineError
    given = {name: reply[name] for name in ("field", "found", "expected") if reply.get(name) is not None}
    return kind(f"{who}: {reply.get('what', 'failed')}", do=str(reply.get("do", "")), **given)
