"""Blocks of the configuration that a room of the core reads whole: their keys, defaults, help and checks.

Owns the model of a block, and the blocks ``contract``, ``adapter``, ``rdma``, ``rollout`` and those of ``also``. Owns no
reading of files and no environment (config.py).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

__all__ = ["Adapter", "Contract", "Keys", "Outlet", "Rdma", "Rollout"]


class Keys(BaseModel):
    """What all blocks have in common: an unknown key is an error, and nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's yes would count as 1."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and not {int, float}.isdisjoint(get_args(kind) or (kind,)):
            raise ValueError("a number")
        return value


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


class Adapter(Keys):
    """Of a run whose versions are LoRA adapters to one version of a base; docs/lora.md."""

    base: str | None = Field(
        None,
        description="what is adapted: a checkpoint folder, or a store of its versions, URI or URI@N (default: head)",
    )
    base_view: str | None = Field(None, description="view of the base's version; default: the only one")


class Rdma(Keys):
    """Of the rdma backend; docs/rdma.md says what to set on a cluster."""

    commit: Literal["shadow", "direct"] = Field(
        "shadow", description="land beside the live weights, or straight in them inside the fence (no undo)"
    )
    transports: str | None = Field(None, description="UCX_TLS; default: UCX's choice, tcp and sm without RDMA devices")
    devices: str | None = Field(None, description="UCX_NET_DEVICES; default: UCX's choice")
    chunk_bytes: int = Field(8 << 20, ge=1 << 12, description="largest write of a schedule")
    in_flight: int = Field(4, ge=1, le=1024, description="posts in flight to one engine rank")
    staging_bytes: int = Field(256 << 20, ge=1 << 16, description="most memory for bits on their way to one engine")
    gather_bytes: int = Field(16 << 10, ge=0, description="bits that lie in shorter runs are gathered, then written")
    barrier: bool = Field(False, description="trainer ranks wait for each other between mesh groups")
    ring_bytes: int = Field(0, ge=0, description="room for patches in each engine's memory; 0: whole states only")
    sparse_share: float = Field(0.25, ge=0, le=1, description="patches up to this share of a state travel as patches")
    window_s: float = Field(60.0, gt=0, description="longest wait for a version to land")
    patience_s: float = Field(5.0, ge=0, description="how long a new version waits for writes of the one before")
    poll_s: float = Field(0.002, gt=0, description="pause between looks for end notes in the receive window")


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
