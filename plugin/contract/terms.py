"""What a trainer asks of engines, and whether an engine is like that: pure functions that give their reasons.

Owns the rules (exactly, one of, at most, same as the trainer), the profiles' own rules and the decision. Owns no
measuring, no message to people and no refusal (enforcing.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from weight_sync.contract.message import check_field, facts, kind_of
from weight_sync.errors import ConfigError
from weight_sync.proto.v1 import contract_pb2

__all__ = [
    "PROFILES",
    "Action",
    "Difference",
    "Rule",
    "Verdict",
    "compare",
    "decide",
    "differences",
    "parse_rules",
    "terms_of",
]

_WHERE = "weight_sync.contract.require"
_DETERMINISTIC: Mapping[str, Any] = {"batch_invariant": True, "deterministic": True}
_SAME = (
    "attention_backend", "accumulation_dtype", "compute_dtype", "engine_version", "expert_parallel", "kernel_versions.cpu",
    "kernel_versions.torch", "pipeline_parallel", "reduction_order", "served_format", "tensor_parallel",
)  # fmt: skip
PROFILES: Mapping[str, Mapping[str, Any]] = {
    "native": {},
    "deterministic": _DETERMINISTIC,
    "unified": {**_DETERMINISTIC, **{name: {"same": True} for name in _SAME}},
}
"""Rules of each profile, over which ``require`` is laid."""


@dataclass(frozen=True)
class Rule:
    """What one field must be: one of ``one_of``, or a number up to ``at_most``, or what it is at the trainer."""

    field: str
    one_of: tuple[str, ...] = ()
    at_most: float | None = None
    same: bool = False


@dataclass(frozen=True)
class Difference:
    """A field that is not as it must be; ``found`` is None for what the engine does not know of itself."""

    field: str
    found: str | None
    expected: str

    def __str__(self) -> str:
        return f"{self.field} is {'not known' if self.found is None else self.found}, asked for is {self.expected}"


class Action(Enum):
    """What follows for an engine."""

    ACCEPT = "accept"
    WARN = "warn"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Verdict:
    """A decision with its reasons."""

    action: Action
    differences: tuple[Difference, ...] = ()

    @property
    def reason(self) -> str:
        """All differences in a line; "" when there are none."""
        return "; ".join(map(str, self.differences))


# --- rules ------------------------------------------------------------------------------------------------------------


def parse_rules(require: Mapping[str, Any]) -> list[Rule]:
    """The rules of the key ``contract.require``, sorted by field.

    A value is what the field must be exactly; or an object with one of ``exact``, ``one_of`` (a list), ``at_most`` (a
    number) and ``same: true``. Raises ConfigError that names the field.
    """
    found: dict[str, Rule] = {}
    for name, value in require.items():
        if name in ("kernel_versions", "sampling"):  # as the command line's dots nest them
            if not isinstance(value, Mapping):
                raise ConfigError("not a mapping", field=f"{_WHERE}.{name}", found=value, expected="name: rule")
            found |= {f"{name}.{inner}": _rule(f"{name}.{inner}", rule) for inner, rule in value.items()}
        else:
            found[name] = _rule(check_field(name, _WHERE), value)
    return [found[name] for name in sorted(found)]


def _rule(name: str, value: Any) -> Rule:
    where = f"{_WHERE}.{check_field(name, _WHERE)}"
    if not isinstance(value, Mapping):
        value = {"exact": value}
    if len(value) != 1 or not set(value) <= {"exact", "one_of", "at_most", "same"}:
        raise ConfigError("not a rule", field=where, found=dict(value),
                          expected="a value, or one of exact, one_of, at_most and same")  # fmt: skip
    (verb, operand), *_ = value.items()
    if verb == "same":
        if operand is not True:
            raise ConfigError("not a rule", field=where, found=operand, expected="same: true, or no rule")
        return Rule(name, same=True)
    if verb == "at_most":
        if kind_of(name) is bool or (kind_of(name) is str and "." not in name):
            raise ConfigError("no number, so it has no most", field=where, found=operand, expected="exact or one_of")
        if isinstance(operand, bool) or not isinstance(operand, int | float):
            raise ConfigError("not a number", field=where, found=operand, expected="a number")
        return Rule(name, at_most=float(operand))
    values = operand if verb == "one_of" else [operand]
    if not isinstance(values, list | tuple) or not values:
        raise ConfigError("not a list", field=where, found=operand, expected="one or more values")
    return Rule(name, one_of=tuple(_text(name, one, where) for one in values))


def _text(name: str, value: Any, where: str) -> str:
    kind = kind_of(name)
    if kind is str and isinstance(value, str | int | float | bool):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ConfigError("not a value of this field", field=where, found=value, expected=kind.__name__)
    return str(value).lower()


def terms_of(
    profile: str, enforce: str, require: Mapping[str, Any], own: contract_pb2.ExecutionContract | None
) -> contract_pb2.ContractTerms:
    """What travels with versions: the profile's rules and ``require`` over them, with the trainer's own values filled in.

    Raises ConfigError when a rule says ``same`` and the trainer does not know its own value.
    """
    rules = {rule.field: rule for rule in [*parse_rules(PROFILES[profile]), *parse_rules(require)]}
    known = {} if own is None else facts(own)
    terms = contract_pb2.ContractTerms(enforce=f"ENFORCEMENT_{enforce.upper()}", profile=profile)
    for name in sorted(rules):
        rule = rules[name]
        if rule.same and name not in known:
            raise ConfigError("engines must be like the trainer, which does not know its own value",
                              field=f"{_WHERE}.{name}", expected=f"a contract of the trainer with {name}",
                              do="give the trainer's own contract to Publisher.open, or another profile")  # fmt: skip
        values = (known[name],) if rule.same else rule.one_of
        terms.terms.add(field=name, one_of=values, at_most=rule.at_most)
    return terms


# --- the decision -----------------------------------------------------------------------------------------------------


def differences(terms: contract_pb2.ContractTerms, presented: contract_pb2.ExecutionContract) -> tuple[Difference, ...]:
    """Fields of a contract that are not as the terms want them, sorted by field. What is not known is a difference."""
    known = facts(presented)
    out = []
    for term in terms.terms:
        found = known.get(term.field)
        if term.HasField("at_most"):
            if not _at_most(found, term.at_most):
                out.append(Difference(term.field, found, f"at most {term.at_most:g}"))
        elif found not in term.one_of:
            values = list(term.one_of)
            out.append(Difference(term.field, found, values[0] if len(values) == 1 else "one of " + ", ".join(values)))
    return tuple(out)


def _at_most(found: str | None, most: float) -> bool:
    try:
        return found is not None and float(found) <= most  # a NaN is not
    except ValueError:
        return False


def decide(
    terms: contract_pb2.ContractTerms, presented: contract_pb2.ExecutionContract, enforce: str = "none"
) -> Verdict:
    """Whether an engine may serve versions with these terms.

    Args:
        enforce: none, warn or strict: what this side wants of its own; the stricter of that and the trainer's holds.
    """
    own = contract_pb2.Enforcement.Value(f"ENFORCEMENT_{enforce.upper()}")
    strict = max(own, terms.enforce)
    if strict <= contract_pb2.ENFORCEMENT_NONE:
        return Verdict(Action.ACCEPT)
    found = differences(terms, presented)
    if not found:
        return Verdict(Action.ACCEPT)
    return Verdict(Action.REFUSE if strict == contract_pb2.ENFORCEMENT_STRICT else Action.WARN, found)


def compare(
    a: contract_pb2.ExecutionContract, b: contract_pb2.ExecutionContract
) -> list[tuple[str, str | None, str | None]]:
    """(field, its value in ``a``, in ``b``) where two contracts differ, sorted; None for what is not known."""
    left, right = facts(a), facts(b)
    names = sorted(left.keys() | right.keys())
    return [(name, left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)]
