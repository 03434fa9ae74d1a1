"""The ``weight_sync.*`` keys, once: names, defaults, help and checks. Adapters and the command line read them here.

Owns the configuration model and the reading of the environment. Owns no host syntax and opens nothing.

Environment, read here and nowhere else:
    WEIGHT_SYNC_THREADS     default of ``threads``
    WEIGHT_SYNC_PROFILE     native or deterministic: switches that weight_sync's plugin sets in an engine it is loaded by
    WEIGHT_SYNC_RUNTIME_DIR folder of the sockets on which engines of this host are driven
    WEIGHT_SYNC_CRASH_AT    used by the fault tests only: name of a step at which the process kills itself
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from weight_sync.badkeys import refusal
from weight_sync.blocks import Adapter, Contract, Keys, Outlet, Rdma, Rollout
from weight_sync.errors import ConfigError

__all__ = [
    "Adapter", "Auth", "Config", "Contract", "Rdma", "Signing", "Tls", "Token", "View", "check_name", "crash_point", "load",
]  # fmt: skip

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


def runtime_dir() -> Path:
    """WEIGHT_SYNC_RUNTIME_DIR, else a folder in /tmp of this user; not made here. Engine and driver must agree on it."""
    given = os.environ.get("WEIGHT_SYNC_RUNTIME_DIR")
    return Path(given) if given else Path(f"/tmp/weight_sync-{os.getuid()}")


def wanted_profile() -> str:
    """WEIGHT_SYNC_PROFILE, else native. Raises ConfigError for one that an engine's own process cannot have."""
    given = os.environ.get("WEIGHT_SYNC_PROFILE", "native")
    if given not in ("native", "deterministic"):
        raise ConfigError(
            "no such profile", field="WEIGHT_SYNC_PROFILE", found=given, expected="native or deterministic"
        )
    return given


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


class View(Keys):
    """One named view of every version. docs/views.md lists the schemes."""

    name: str
    base: str | None = Field(None, description="checkpoint that engines of this view boot from")
    scheme: str | None = Field(
        None, description="how served bits come from the trainer's; default: as the base's config.json says"
    )

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        return check_name("views.name", value)


class Tls(Keys):
    """Files for TLS, all PEM. A server needs cert and key; a client that is asked for a certificate, too."""

    cert: str | None = Field(None, description="certificate chain of this side")
    key: str | None = Field(None, description="private key of that certificate")
    ca: str | None = Field(None, description="issuers of servers that this side trusts; default: the system's")
    client_ca: str | None = Field(
        None, description="issuers of client certificates, which a server then demands: mutual TLS"
    )
    server_name: str | None = Field(None, description="name in the server's certificate when it is not the host's")

    @model_validator(mode="after")
    def _pair(self) -> Tls:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("half a pair", field="tls", found="cert" if self.key is None else "key",
                              expected="cert and key")  # fmt: skip
        return self


class Token(Keys):
    """A token that a server knows."""

    token: str | None = Field(None, repr=False, description="the token itself")
    token_file: str | None = Field(None, description="file that holds the token")
    roles: tuple[Literal["publish", "follow", "return", "admin"], ...] = Field(description="what it may do")


class Auth(Keys):
    """Bearer tokens: what a client shows, what a server knows."""

    token: str | None = Field(None, repr=False, description="token that this side shows")
    token_file: str | None = Field(None, description="file that holds it")
    tokens: tuple[Token, ...] = Field((), description="tokens that a server knows; none: nobody is asked for one")


class Signing(Keys):
    """Ed25519 signatures over manifests; keys are PEM files."""

    key: str | None = Field(None, description="private key with which a publisher signs")
    key_id: str = Field("", description="name under which readers know that key")
    trusted: dict[str, str] = Field(
        default_factory=dict, description="public keys by key_id; with any, a reader takes signed versions only"
    )


_OF_SCHEME = {"grpc": "grpc", "grpcs": "grpc", "rdma": "rdma"}  # every other scheme is a store's


class Config(Keys):
    """The ``weight_sync`` block."""

    backend: str = Field(
        "file", description="rdma | grpc | file | the name of a registered transport; default: by the URI's scheme"
    )
    uri: str = Field(description="where versions go or come from: file:///path, s3://bucket/prefix, a plain path, ...")
    base: str | None = Field(None, description="checkpoint that engines boot from: a folder of safetensors files")
    base_hf_id: str = Field("", description="hub name of the base, as a hint for engines")
    base_hf_revision: str = Field("", description="hub revision of the base, as a hint for engines")
    ship_base: Literal["auto", "always", "never"] = Field(
        "auto", description="upload the base as anchor 0: always, never, or auto: when a replica asks for it"
    )
    also: tuple[Outlet, ...] = Field((), description="further outlets of the same publish")
    store: str | None = Field(None, description="where a push or grpc publisher keeps history")
    listen: str | None = Field(None, description="host:port that a server listens on; default: the one of the uri")
    insecure: bool = Field(False, description="listen, or show a token, in the open where that would be refused")
    tls: Tls = Field(default_factory=lambda: Tls.model_validate({}), description="files for TLS")
    auth: Auth = Field(default_factory=lambda: Auth.model_validate({}), description="bearer tokens")
    signing: Signing = Field(
        default_factory=lambda: Signing.model_validate({}), description="signatures over manifests"
    )
    rdma: Rdma = Field(default_factory=lambda: Rdma.model_validate({}), description="of the rdma backend")
    contract: Contract = Field(
        default_factory=lambda: Contract.model_validate({}),
        description="what engines must be like, and the mismatch bound",
    )
    rollout: Rollout = Field(
        default_factory=lambda: Rollout.model_validate({}), description="engines elsewhere that answer a host's prompts"
    )
    connections: int = Field(4, ge=1, le=64, description="connections that large reads from a server use at once")
    calls_per_s: float = Field(2000.0, gt=0, description="calls per second that a server grants to one machine")
    cache_bytes: int = Field(32 << 30, ge=1 << 20, description="quota of what is kept of a store in cache_dir")
    metrics: str | None = Field(None, description="host:port where a server shows Prometheus metrics")
    inbox: str | None = Field(
        None, description="SQLite file of the trainer's inbox; default: a server's is in its store"
    )
    inbox_count: int = Field(100_000, ge=1, description="most trajectories that wait in the inbox; then engines wait")
    inbox_bytes: int = Field(4 << 30, ge=1 << 20, description="most bytes that wait in the inbox; then engines wait")
    run_id: str | None = Field(
        None, description="run to open or follow; default: the newest in the store, else a new one"
    )
    fork: bool = Field(
        False,
        description="start a new run that names the newest one as its parent; with run_id once, then that run goes on",
    )
    view: str | None = Field(
        None, description="name of the served view; default: default to publish, the only one there is to follow"
    )
    scheme: str | None = Field(
        None, description="how served bits come from the trainer's: cast, bf16, fp8-block, ...; default: as base says"
    )
    views: tuple[View, ...] = Field((), description="views to publish together, instead of view, base and scheme")
    adapter: Adapter = Field(
        default_factory=lambda: Adapter.model_validate({}), description="set on the publisher of a LoRA adapter"
    )
    forms: tuple[Literal["step", "compact"], ...] = Field(("step",), description="forms in which patches are stored")
    take: Literal["step", "compact"] = Field(
        "compact", description="form that a reader takes where it holds every old bit and the version has both"
    )
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
    wait_acks: int = Field(
        0, ge=0, description="replicas that must serve a version before a host's training goes on; 0: none"
    )
    timeout_s: float = Field(600.0, gt=0, description="limit of any single wait")
    poll_s: float = Field(0.2, gt=0, description="mean pause between looks at a store, jittered by half")
    lease_ttl_s: int = Field(600, ge=1, description="life of a lease that is not renewed")
    pause: Literal["keep", "wait", "abort"] = Field("wait", description="what happens to requests at a fence")
    fence_s: float = Field(60.0, gt=0, description="longest wait for requests in flight at a fence")
    audit_every: int = Field(
        0, ge=0, description="versions between full recomputations of the digest; 0: at attach only"
    )
    replica_id: str | None = Field(
        None,
        description="name of this replica, which no other has; default: host and process, of a relay host and port",
    )
    staging_bytes: int = Field(4 << 30, ge=1 << 20, description="most memory for decoded patches")
    mirror: str | None = Field(
        None, description="folder of a relay's copy of the weights: versions cross the link in the compact form then"
    )
    cache_dir: str | None = Field(None, description="folder for what is kept of a store, and for copies of checkpoints")
    store_options: dict[str, str] = Field(
        default_factory=dict, description="options of the object store: endpoint, region, credentials"
    )

    @model_validator(mode="before")
    @classmethod
    def _backend_by_scheme(cls, data: Any) -> Any:
        uri = data.get("uri") if isinstance(data, dict) else None
        if isinstance(uri, str) and "backend" not in data:
            scheme, found, _ = uri.partition("://")
            return {**data, "backend": _OF_SCHEME.get(scheme, "file") if found else "file"}
        return data

    @field_validator("also")
    @classmethod
    def _also(cls, value: tuple[Outlet, ...]) -> tuple[Outlet, ...]:
        if value:  # a key that did nothing would leave engines without versions
            raise ConfigError("further outlets are not built yet", field="weight_sync.also", found=value[0].uri,
                              expected="no entry",
                              do="backend grpc or rdma with store: one publish serves engines and store")  # fmt: skip
        return value

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
    def _view(cls, value: str | None) -> str | None:
        return None if value is None else check_name("view", value)

    @field_validator("views")
    @classmethod
    def _views(cls, value: tuple[View, ...]) -> tuple[View, ...]:
        names = [view.name for view in value]
        if len(set(names)) != len(names):
            raise ConfigError("two views of one name", field="weight_sync.views", found=names)
        if len({view.base is None for view in value}) > 1:
            raise ConfigError("some views have a base", field="weight_sync.views",
                              found=[view.name for view in value if view.base is None], expected="all or none",
                              do="give each view the checkpoint that its engines boot from")  # fmt: skip
        return value

    @property
    def published(self) -> tuple[View, ...]:
        """The views to publish. Raises ConfigError when keys of one view stand beside ``views``."""
        if not self.views:
            return (View(name=self.view or "default", base=self.base, scheme=self.scheme),)
        beside = [key for key in ("view", "base", "scheme") if getattr(self, key) is not None]
        if beside:
            raise ConfigError("keys of one view beside views", field=f"weight_sync.{beside[0]}",
                              found=getattr(self, beside[0]), do="set it in the entry of that view")  # fmt: skip
        return self.views

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
        from weight_sync.yamlfile import read_yaml

        data = read_yaml(source)
    else:
        data = dict(source)
    if isinstance(data, dict) and "weight_sync" in data:  # beside it may stand what a host reads of the same file
        ours = sorted(data.keys() & Config.model_fields.keys())
        if ours:
            raise ConfigError("a key beside the block", field=ours[0], found="beside weight_sync:",
                              expected=f"weight_sync.{ours[0]}", do="indent it below weight_sync:")  # fmt: skip
        data = data["weight_sync"]
        if not isinstance(data, dict):
            raise ConfigError("not a block of keys", field="weight_sync", found=data, expected="key: value lines below it",
                              do="set at least uri; weight-sync config lists all keys")  # fmt: skip
    if not isinstance(data, dict):
        where = str(source) if isinstance(source, str | Path) else ""
        raise ConfigError("not a mapping", field=where, found=type(data).__name__, expected="key: value lines")
    data = _nested({**data, **overrides})
    try:
        return Config(**data)
    except ValidationError as error:
        raise refusal(Config, error) from error


def _nested(data: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with dots, as the command line gives them, as blocks in blocks."""
    out = {key: value for key, value in data.items() if "." not in str(key)}
    for key, value in data.items():
        outer, dot, inner = str(key).partition(".")
        if dot:
            block = out.get(outer)
            out[outer] = _nested({**(block if isinstance(block, Mapping) else {}), inner: value})
    return out
