"""Blocks of the configuration that a room of the core reads whole: their keys, defaults, help and checks.

Owns the model of a block, and the blocks ``contract``, ``rollout`` and those of ``also``. Owns no reading of files
and no environment (config.py).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["Contract", "Keys", "Outlet", "Rollout"]


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


class Outlet(Keys):
    """One further way out of the same publish."""

    backend: str
    uri: str


class Rollout(Keys):
    """Of engines elsewhere, behind sidecars, that answer a host's prompts; docs/trainers.md."""

    engines: tuple[str, ...] = Field((), description="addresses of sidecars; none: the host's own engines answer")
    flavour: str = Field("completions", description="API of the engines: completions, vllm or sglang")
    model: str | None = Field(None, description="name that requests carry, where the API wants one")
    max_staleness: int | None = Field(
        None, ge=0, description="version numbers that an answer may be behind; older ones are asked for again"
    )
    per_engine: int = Field(64, ge=1, description="samples in flight at one engine")
    request_s: float = Field(300.0, gt=0, description="limit of one request; then another engine is asked")
    deadline_s: float = Field(1800.0, gt=0, description="limit of one sample, from its first request to its answer")
    token_file: str | None = Field(None, description="file that holds the token that requests show")
    uri: str | None = Field(
        None, description="address of the run for processes that ask for samples; default: uri, when it can be dialled"
    )
