"""The execution contract: how a side computes, what a trainer asks of engines, and how far two sides agree in numbers.

Owns the public names of this room. The messages are proto/v1/contract.proto; who fills them in is an adapter's. Owns no
store, no wire and no model.
"""

from __future__ import annotations

from weight_sync.contract.enforcing import ContractCheck, Declaration
from weight_sync.contract.facts import process_contract
from weight_sync.contract.message import FIELDS, contract_id, document, facts, from_document, seal
from weight_sync.contract.monitor import Alarm, Cause, Finding, MismatchMonitor, MismatchReport
from weight_sync.contract.terms import Action, Difference, Verdict, compare, decide, differences, terms_of

__all__ = [
    "FIELDS",
    "Action",
    "Alarm",
    "Cause",
    "ContractCheck",
    "Declaration",
    "Difference",
    "Finding",
    "MismatchMonitor",
    "MismatchReport",
    "Verdict",
    "compare",
    "contract_id",
    "decide",
    "differences",
    "document",
    "facts",
    "from_document",
    "process_contract",
    "seal",
    "terms_of",
]
