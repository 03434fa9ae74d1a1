"""A trainer's terms on their way into manifests, and one engine before them: let on, warned about once, or refused.

Owns what is declared, what an engine presented last and what was warned about. Owns no rule (terms.py) and no moment
(whoever calls).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from weight_sync.contract.message import seal
from weight_sync.contract.terms import Action, decide, terms_of
from weight_sync.errors import ContractError
from weight_sync.proto.v1 import contract_pb2, manifest_pb2

__all__ = ["ContractCheck", "Declaration", "refusal"]

_LOG = logging.getLogger("weight_sync.contract")


class Keys(Protocol):
    """The block ``contract`` of the configuration."""

    @property
    def profile(self) -> str: ...
    @property
    def enforce(self) -> str: ...
    @property
    def require(self) -> Mapping[str, Any]: ...


class Declaration:
    """What a trainer says with each version: how it computes itself, and what engines must be like.

    Raises ConfigError when a rule refers to a value that the trainer does not know.
    """

    def __init__(self, keys: Keys, own: contract_pb2.ExecutionContract | None) -> None:
        self._own = None if own is None else seal(own)
        self._terms = terms_of(keys.profile, keys.enforce, keys.require, self._own)

    def write(self, manifest: manifest_pb2.VersionManifest) -> None:
        """Into a manifest that is about to be committed. Terms that ask for nothing are left out."""
        if self._own is not None:
            manifest.contract.CopyFrom(self._own)
        if self._terms.terms:
            manifest.terms.CopyFrom(self._terms)


def refusal(who: str, reason: str) -> ContractError:
    """The error for an engine that differs."""
    return ContractError(f"{who} does not compute as the trainer asks", field="contract", found=reason,
                         do="start the engine in that way, or relax weight_sync.contract at the trainer")  # fmt: skip


class ContractCheck:
    """Not thread-safe.

    Args:
        enforce: none, warn or strict: this side's own wish; the stricter of it and the trainer's holds.
        who: the engine, for messages.

    Attributes:
        contract: as the engine presented it last, sealed; empty before.
    """

    def __init__(self, enforce: str, who: str) -> None:
        self.contract = contract_pb2.ExecutionContract()
        self._presented = False
        self._enforce, self._who = enforce, who
        self._warned: set[tuple[str, bytes]] = set()

    def present(self, contract: contract_pb2.ExecutionContract) -> contract_pb2.ExecutionContract:
        """How the engine computes, by its own account; sealed."""
        self.contract, self._presented = seal(contract), True
        return self.contract

    def check(self, manifest: manifest_pb2.VersionManifest) -> None:
        """Whether the engine may serve this version. Raises ContractError with everything that differs.

        Before an engine has presented anything it is not checked; one that presents nothing known is.
        """
        if not self._presented or not manifest.HasField("terms"):
            return
        verdict = decide(manifest.terms, self.contract, self._enforce)
        if verdict.action is Action.REFUSE:
            raise refusal(self._who, verdict.reason)
        if verdict.action is Action.WARN:
            key = (self.contract.id, manifest.terms.SerializeToString(deterministic=True))
            if key not in self._warned:
                self._warned.add(key)
                _LOG.warning("%s does not compute as the trainer asks: %s", self._who, verdict.reason)
