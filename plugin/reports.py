"""What one publish or one sync did, in numbers.

Owns PublishReport, ViewReport and SyncReport. Owns no measurement: the publisher and the replica fill them in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from weight_sync.codec.digest import Digest
from weight_sync.history import view_of
from weight_sync.proto.v1 import common_pb2, manifest_pb2

__all__ = ["PublishReport", "SyncReport", "ViewReport", "publish_report"]


@dataclass(frozen=True)
class ViewReport:
    """What one publish did to one view. Fields as in `PublishReport`."""

    scheme: str
    elements: int
    changed: int
    patch_bytes: int
    anchor_bytes: int
    digest: str

    @property
    def density(self) -> float:
        """Changed elements over all elements."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def bits_per_changed(self) -> float:
        """Stored bits of the patch per changed element; 0 when nothing changed."""
        return 8 * self.patch_bytes / self.changed if self.changed else 0.0


@dataclass(frozen=True)
class PublishReport:
    """What one publish did.

    Attributes:
        version: number of the version, with its run.
        kind: "PATCH" or "ANCHOR".
        step: the trainer's.
        elements, changed: of all views, all ranks.
        patch_bytes: stored bytes of the patch, all ranks, all forms, all views.
        anchor_bytes: stored bytes of the full state, all views, 0 without one.
        digest: of the state of the first view, 32 hex digits.
        seconds: by phase: diff, send, commit, promote, and total.
        reason: why a full state was written, "" for none.
        collect_error: why the collection after it failed, "" when it did not or was not due.
        views: the same by view, in the order in which they are configured.
    """

    version: int
    run_id: str
    kind: str
    step: int | None
    elements: int
    changed: int
    patch_bytes: int
    anchor_bytes: int
    digest: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    collect_error: str = ""
    views: Mapping[str, ViewReport] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """Changed elements over all elements."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def bits_per_changed(self) -> float:
        """Stored bits of the patch per changed element; 0 when nothing changed."""
        return 8 * self.patch_bytes / self.changed if self.changed else 0.0


def publish_report(manifest: manifest_pb2.VersionManifest, names: Iterable[str], seconds: Mapping[str, float],
                   reason: str, collect_error: str) -> PublishReport:  # fmt: skip
    """Of a committed version, in the views ``names``."""
    views = {name: _view_report(view_of(manifest, name)) for name in names}
    parts = list(views.values())
    return PublishReport(
        version=manifest.number, run_id=manifest.run_id,
        kind="ANCHOR" if manifest.kind == manifest_pb2.ENTRY_KIND_ANCHOR else "PATCH",
        step=manifest.step if manifest.HasField("step") else None,
        elements=sum(part.elements for part in parts), changed=sum(part.changed for part in parts),
        patch_bytes=sum(part.patch_bytes for part in parts), anchor_bytes=sum(part.anchor_bytes for part in parts),
        digest=parts[0].digest, seconds=dict(seconds), reason=reason, collect_error=collect_error, views=views,
    )  # fmt: skip


def _view_report(view: manifest_pb2.ViewManifest) -> ViewReport:
    raw = common_pb2.FORM_RAW
    return ViewReport(
        scheme=view.scheme, elements=view.elements, changed=view.changed,
        patch_bytes=sum(ref.size for ref in view.shards if ref.form != raw),
        anchor_bytes=sum(ref.size for ref in view.shards if ref.form == raw),
        digest=Digest.from_proto(view.digest).hex(),
    )  # fmt: skip


@dataclass(frozen=True)
class SyncReport:
    """What one sync did.

    Attributes:
        version: served now.
        previous: served before; None when it was none.
        changed: False when nothing had to be done.
        staleness: newest version seen minus the one served, in numbers.
        path: how it got there, in words.
        digest: of the state, 32 hex digits.
        seconds: prepare (fetch, check, decode, fold), stage, pause (all of the fence), apply, total.
        ack_error: why the trainer could not be told; "" when it was.
        run_id: of the version served now; versions of two runs have nothing in common.
    """

    version: int
    previous: int | None
    changed: bool
    staleness: int = 0
    path: str = ""
    digest: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    ack_error: str = ""
    run_id: str = ""

    @property
    def pause_s(self) -> float:
        """Length of the fence in seconds."""
        return self.seconds.get("pause", 0.0)
