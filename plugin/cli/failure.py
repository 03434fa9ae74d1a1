"""What a command's failure looks like: an exit code per branch of the error tree, one line, and JSON on request.

Owns the codes (docs/cli.md lists them) and the shape of an error's JSON. Owns no error.
"""

from __future__ import annotations

from typing import Any

from weight_sync import errors

__all__ = ["CODES", "FAILED", "FAULTY", "INTERRUPTED", "USAGE", "describe", "exit_code"]

FAILED = 1
USAGE = 2
FAULTY = 3
INTERRUPTED = 130

CODES: dict[type[BaseException], int] = {
    errors.InputError: USAGE,  # fix the input, then call again
    errors.CorruptionError: FAULTY,  # bytes are not what was written
    errors.DigestMismatchError: FAULTY,
    errors.VersionError: 4,  # the version cannot be had, or not yet
    errors.DeadlineError: 4,
    errors.LineageError: 5,  # another line of history: stop, fork or rebuild
    errors.StoreError: 6,  # the store refused or failed
    errors.EngineError: 7,  # the engine could not do what was asked
}
"""Exit code by branch of the error tree; anything else is FAILED."""


def exit_code(error: BaseException) -> int:
    """Of the branch that the error is on."""
    return next((code for branch, code in CODES.items() if isinstance(error, branch)), FAILED)


def describe(error: BaseException, code: int) -> dict[str, Any]:
    """An error as JSON: kind, message and its parts, with found and expected as text."""
    document: dict[str, Any] = {"kind": type(error).__name__, "message": str(error), "exit_code": code}
    if isinstance(error, errors.WeightSyncError):
        document |= {
            "what": error.what,
            "field": error.field,
            "found": None if error.found is None else str(error.found),
            "expected": None if error.expected is None else str(error.expected),
            "do": error.do,
        }
    return document
