"""Blocks of the configuration that a room of the core reads whole: their keys, defaults, help and checks.

Owns the model of a block, and the block ``contract``. Owns no reading of files and no environment (config.py).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["Contract", "Keys"]


class Keys(BaseModel):
    """What all blocks have in common: an unknown key is an error, and nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, validate_default=True)


class Contract(Keys):
    """How engines must compute, and how far their numbers may be from the trainer's; docs/contract.md."""

    profile: Literal["native", "deterministic", "unified"] = Field(
        "native", description="native: anything; deterministic: batch-invariant switches on; unified: bitwise equal"
    )
    enforce: Literal["none", "warn", "strict"] = Field(
        "warn", description="of an engine that differs: nothing, a warning, or it serves nothing"
    )
    require: dict[str, Any] = Field(
        default_factory=dict, description="by field of the contract: a value, or exact, one_of, at_most, same: true"
    )
    bound: float = Field(0.01, gt=0, description="mean |logprob difference| above which the mismatch monitor alarms")
    outlier: float = Field(0.1, gt=0, description="|logprob difference| above which a token counts as an outlier")

    @field_validator("require")
    @classmethod
    def _require(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value:
            from weight_sync.contract.terms import parse_rules  # not for who only lists the keys

            parse_rules(value)
        return value
