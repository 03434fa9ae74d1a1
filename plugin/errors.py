"""Every error that weight_sync raises on purpose, branched by what the caller does next.

Owns the tree and the shape of a message. Owns no decision: rooms raise these, callers choose.

    WeightSyncError
    ├── InputError            fix the input, then call again
    │   ├── ConfigError       a key, a value or a URI of the configuration
    │   ├── TensorError       a tensor that was offered: name, dtype, shape, value
    │   ├── TrajectoryError   a trajectory that was sent: which field, and why it cannot be learnt from
    │   └── LayoutError       storage and checkpoint coordinates do not fit together
    │       └── UntraceableError  a converter does arithmetic; probe or gather instead
    ├── CorruptionError       stored or received bytes are not what was written: fetch again, then give up
    │   └── FormatError       the bytes cannot be weight_sync data at all, or of a newer format
    ├── LineageError          this writer or reader is on another line of history: stop, fork or rebuild
    │   ├── EpochFencedError  a newer publisher owns the run
    │   ├── WrongBaseError    the state to apply to is not the state that the patch was made from
    │   └── ForkRequiredError the trainer's state is older than the run's head, or has another base
    ├── VersionError          the version cannot be had
    │   ├── VersionMissingError   it never existed, was aborted, or has not been published yet
    │   ├── VersionExpiredError   it existed and was collected
    │   └── VersionNotReadyError  it was not reached within the time given
    ├── StoreError            the store refused or failed
    │   ├── StoreUnavailableError may pass: try again later
    │   │   └── InboxFullError    the trainer is behind: send again after retry_after_s
    │   ├── StoreFullError        no space left
    │   └── StoreReadOnlyError    no permission to write
    ├── EngineError           an engine could not do what was asked; it still serves its old version
    │   ├── EngineInDoubtError    its weights match no known version: it must not serve until rebuilt
    │   └── ContractError     it does not compute as the trainer asks: start it in another way
    ├── DigestMismatchError   the bits are not the version's bits; nothing was announced
    └── DeadlineError         a wait ran into its limit
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ConfigError",
    "ContractError",
    "CorruptionError",
    "DeadlineError",
    "DigestMismatchError",
    "EngineError",
    "EngineInDoubtError",
    "EpochFencedError",
    "ForkRequiredError",
    "FormatError",
    "InboxFullError",
    "InputError",
    "LayoutError",
    "LineageError",
    "StoreError",
    "StoreFullError",
    "StoreReadOnlyError",
    "StoreUnavailableError",
    "TensorError",
    "TrajectoryError",
    "UntraceableError",
    "VersionError",
    "VersionExpiredError",
    "VersionMissingError",
    "VersionNotReadyError",
    "WeightSyncError",
    "WrongBaseError",
]

_UNSET: Any = object()


class WeightSyncError(Exception):
    """Base of all. ``field`` names what was wrong, ``found`` and ``expected`` say how, ``do`` says what helps.

    >>> str(ConfigError("unknown key", field="backnd", expected="backend", do="rename the key"))
    "unknown key: backnd; expected 'backend'; to fix it: rename the key"
    """

    def __init__(
        self, what: str, *, field: str | None = None, found: Any = _UNSET, expected: Any = _UNSET, do: str = ""
    ) -> None:
        self.what, self.field, self.do = what, field, do
        self.found = None if found is _UNSET else found
        self.expected = None if expected is _UNSET else expected
        text = what if field is None else f"{what}: {field}"
        if found is not _UNSET:
            text += f"; found {found!r}"
        if expected is not _UNSET:
            text += f"; expected {expected!r}"
        if do:
            text += f"; to fix it: {do}"
        super().__init__(text)


class InputError(WeightSyncError, ValueError):
    """The input is wrong; the call changed nothing."""


class ConfigError(InputError):
    """A key, a value or a URI of the configuration is wrong."""


class TensorError(InputError):
    """A tensor that was offered cannot be published or received as it is."""


class TrajectoryError(InputError):
    """A trajectory that was sent cannot be learnt from; nothing of its batch was kept."""


class LayoutError(InputError):
    """Storage and checkpoint coordinates do not fit together."""


class UntraceableError(LayoutError):
    """A converter makes new data instead of moving it, so it cannot be traced on meta tensors."""


class CorruptionError(WeightSyncError):
    """Bytes are not what was written."""


class FormatError(CorruptionError):
    """Bytes cannot be weight_sync data at all, or are of a newer format."""


class LineageError(WeightSyncError):
    """This side is on another line of history."""


class EpochFencedError(LineageError):
    """A newer publisher owns the run; this one must stop."""


class WrongBaseError(LineageError):
    """The state to apply to is not the state that the patch was made from."""


class ForkRequiredError(LineageError):
    """The trainer's state is older than the run's head, or has another base."""


class VersionError(WeightSyncError):
    """The version cannot be had."""


class VersionMissingError(VersionError):
    """It never existed, was aborted, or has not been published yet."""


class VersionExpiredError(VersionError):
    """It existed and was collected."""


class VersionNotReadyError(VersionError):
    """It was not reached within the time given."""


class StoreError(WeightSyncError):
    """The store refused or failed."""


class StoreUnavailableError(StoreError):
    """The store failed in a way that may pass."""


class InboxFullError(StoreUnavailableError):
    """The trainer does not take trajectories as fast as they come; nothing of the batch was kept.

    Attributes:
        retry_after_s: seconds after which there probably is room.
    """

    def __init__(self, what: str, retry_after_s: float, **parts: Any) -> None:
        super().__init__(what, **parts)
        self.retry_after_s = retry_after_s


class StoreFullError(StoreError):
    """The store has no space left."""


class StoreReadOnlyError(StoreError):
    """The store does not let this process write."""


class EngineError(WeightSyncError):
    """An engine could not do what was asked; it still serves its old version."""


class EngineInDoubtError(EngineError):
    """An engine's weights match no known version; it must not serve until it is rebuilt."""


class ContractError(EngineError):
    """An engine does not compute as the trainer asks, and the trainer is strict about it."""


class DigestMismatchError(WeightSyncError):
    """The bits are not the version's bits."""


class DeadlineError(WeightSyncError, TimeoutError):
    """A wait ran into its limit."""
