"""The ``weight_sync.*`` keys, once: names, defaults, help and checks. Adapters and the command line read them here.

Owns the configuration model and the reading of the environment. Owns no host syntax and opens nothing.

Environment, read here and nowhere else:
    WEIGHT_SYNC_THREADS  default of ``threads``
    WEIGHT_SYNC_CRASH_AT used by the fault tests only: name of a step at which the process kills itself
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from weight_sync.errors import ConfigError

__all__ = ["Config", "check_name", "crash_point", "load"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(kind: str, value: str) -> str:
    """``value`` when it may become part of an object key (run ids, views, replica ids). Raises ConfigError."""
    if not _NAME.fullmatch(value) or ".." in value:
        raise ConfigError(
            "not a usable name",
            field=kind,
            found=value,
            expected="1 to 128 of A-Z a-z 0-9 . _ - , no '..', first a letter or digit",
        )
    return value


def default_threads() -> int:
    """WEIGHT_SYNC_THREADS, else the cores this process may use, at most 8."""
    given = os.environ.get("WEIGHT_SYNC_THREADS")
    if given is None:
        return min(8, len(os.sched_getaffinity(0)))
    if not given.isdigit() or int(given) < 1:
        raise ConfigError("not a thread count", field="WEIGHT_SYNC_THREADS", found=given, expected="1 or more")
    return int(given)


def crash_point(step: str) -> None:
    """Kills the process with SIGKILL when WEIGHT_SYNC_CRASH_AT names this step: the fault tests' only hook.

    Steps are named where they happen. ``step`` may be given as ``step#k`` in the variable: the k-th time, from 1.
    """
    wanted = os.environ.get("WEIGHT_SYNC_CRASH_AT")
    if not wanted:
        return
    name, _, at = wanted.partition("#")
    if name != step:
        return
    _crash_counts[step] = _crash_counts.get(step, 0) + 1
    if _crash_counts[step] == int(at or 1):
        os.kill(os.getpid(), 9)


_crash_counts: dict[str, int] = {}


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, validate_default=True)


class Outlet(_Keys):
    """One further way out of the same publish."""

    backend: str
    uri: str


class Config(_Keys):
    """The ``weight_sync`` block."""

    backend: str = Field("file", description="rdma | grpc | file | the name of a registered transport")
    uri: str = Field(description="where versions go or come from: file:///path, s3://bucket/prefix, a plain path, ...")
    base: str | None = Field(None, description="checkpoint that engines boot from: a folder of safetensors files")
    base_hf_id: str = Field("", description="hub name of the base, as a hint for engines")
    base_hf_revision: str = Field("", description="hub revision of the base, as a hint for engines")
    ship_base: Literal["auto", "always", "never"] = Field(
        "auto", description="upload the base as anchor 0: always, never, or auto: when a replica asks for it"
    )
    also: tuple[Outlet, ...] = Field((), description="further outlets of the same publish")
    store: str | None = Field(None, description="where a push or grpc publisher keeps history")
    run_id: str | None = Field(
        None, description="run to open or follow; default: the newest in the store, else a new one"
    )
    fork: bool = Field(
        False,
        description="start a new run that names the newest one as its parent; with run_id once, then that run goes on",
    )
    view: str = Field("default", description="name of the served view that is published or followed")
    forms: tuple[Literal["step", "compact"], ...] = Field(("step",), description="forms in which patches are stored")
    anchor_every: int = Field(50, ge=0, description="versions between full states; 0: never by count")
    anchor_share: float = Field(
        1.0, ge=0, description="write a full state when patches since the last exceed this share of it; 0: never"
    )
    keep_versions: int = Field(100, ge=1, description="newest versions that retention keeps")
    collect_every: int = Field(0, ge=0, description="versions between collections by the publisher; 0: only by command")
    snapshot: Literal["device", "memory", "file"] = Field("memory", description="where the diff base is kept")
    snapshot_dir: str | None = Field(None, description="folder of the file snapshot; default: a temporary folder")
    refuse_nonfinite: bool = Field(False, description="refuse to publish NaN and infinity instead of carrying them")
    threads: int = Field(default_factory=default_threads, ge=1, le=256, description="threads of the codec")
    overlap: bool = Field(False, description="upload and commit in the background while training goes on")
    timeout_s: float = Field(600.0, gt=0, description="limit of any single wait")
    poll_s: float = Field(0.2, gt=0, description="mean pause between looks at a store, jittered by half")
    lease_ttl_s: int = Field(600, ge=1, description="life of a lease that is not renewed")
    pause: Literal["keep", "wait", "abort"] = Field("wait", description="what happens to requests at a fence")
    fence_s: float = Field(60.0, gt=0, description="longest wait for requests in flight at a fence")
    audit_every: int = Field(
        0, ge=0, description="versions between full recomputations of the digest; 0: at attach only"
    )
    replica_id: str | None = Field(None, description="name of this replica; default: host and process")
    staging_bytes: int = Field(4 << 30, ge=1 << 20, description="most memory for decoded patches")
    cache_dir: str | None = Field(None, description="folder for canonical copies of checkpoints")
    store_options: dict[str, str] = Field(
        default_factory=dict, description="options of the object store: endpoint, region, credentials"
    )

    @field_validator("run_id")
    @classmethod
    def _run_id(cls, value: str | None) -> str | None:
        return None if value is None else check_name("run_id", value)

    @field_validator("forms")
    @classmethod
    def _forms(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "step" not in value:  # it is what folds, serves ranges and promotes the publisher's own base
            raise ConfigError(
                "patches are always stored in step form", field="forms", found=value, expected="step first"
            )
        return tuple(dict.fromkeys(value))

    @field_validator("view")
    @classmethod
    def _view(cls, value: str) -> str:
        return check_name("view", value)

    @field_validator("replica_id")
    @classmethod
    def _replica_id(cls, value: str | None) -> str | None:
        return None if value is None else check_name("replica_id", value)

    def replace(self, **changes: Any) -> Config:
        """A copy with other values, checked again."""
        return load({**self.model_dump(), **changes})


def load(source: Mapping[str, Any] | str | Path, **overrides: Any) -> Config:
    """Reads the block from a mapping or from a YAML file (with or without the ``weight_sync:`` line).

    Raises ConfigError that names the key, and the nearest valid one when the key is unknown.
    """
    if isinstance(source, str | Path):
        import yaml

        try:
            data = yaml.safe_load(Path(source).read_text())
        except OSError as error:
            raise ConfigError("cannot read the configuration", field=str(source), found=error.strerror) from error
        except yaml.YAMLError as error:
            raise ConfigError("not YAML", field=str(source), found=str(error)) from error
    else:
        data = dict(source)
    if isinstance(data, dict) and set(data) == {"weight_sync"}:
        data = data["weight_sync"]
    if not isinstance(data, dict):
        raise ConfigError("configuration is not a mapping", found=type(data).__name__, expected="key: value lines")
    data = {**data, **overrides}
    try:
        return Config(**data)
    except ValidationError as error:
        raise _config_error(error) from error


def _config_error(error: ValidationError) -> ConfigError:
    found = error.errors()
    # a misspelt key often is why another one is missing
    first = next((item for item in found if item["type"] == "extra_forbidden"), found[0])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, list(Config.model_fields), n=1, cutoff=0.0)
        return ConfigError(
            "unknown key",
            field=f"weight_sync.{key}",
            expected=near[0] if near else "a listed key",
            do="weight-sync config lists all keys",
        )
    if first["type"] == "missing":
        return ConfigError("missing key", field=f"weight_sync.{key}", do="set it in the weight_sync block")
    return ConfigError("bad value", field=f"weight_sync.{key}", found=first["input"], expected=first["msg"])
