"""The publisher's account of the line it continues: the head, its tensors and digests, what was written since.

Owns Ledger, HeldView and the publisher's decisions, as pure functions that return a reason. Owns no I/O and no bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weight_sync.codec.digest import Digest, header_digest
from weight_sync.config import Config
from weight_sync.errors import InputError
from weight_sync.history import table_of, view_of
from weight_sync.ports import OpenedRun
from weight_sync.proto.v1 import manifest_pb2, report_pb2
from weight_sync.tensors import TensorSpec
from weight_sync.version import Entry

__all__ = ["HeldView", "Ledger", "anchor_due", "check_step"]


def anchor_due(
    config: Config, head: int | None, since: int, patch_bytes: int, state_bytes: int, wanted: Sequence[str]
) -> str:
    """Why the next version carries a full state; "" when it does not.

    Args:
        since: versions since the last full state.
        patch_bytes: their patches' bytes.
        state_bytes: bytes of a full state.
        wanted: replicas that cannot find the base, or that found damaged objects on their way.
    """
    if head is None:
        return "the run has no version yet"
    if wanted and config.ship_base != "never":
        return f"replica {sorted(wanted)[0]} asks for a full state"
    if config.anchor_every and since + 1 >= config.anchor_every:
        return f"{since + 1} versions since the last full state, anchor_every is {config.anchor_every}"
    if config.anchor_share and patch_bytes > config.anchor_share * state_bytes:
        return f"patches since the last full state hold {patch_bytes} bytes, more than {config.anchor_share:g} of it"
    return ""


def check_labels(step: object, metadata: Mapping[str, str]) -> None:
    """Raises InputError when a version cannot carry these: it is said before anything is sent."""
    if step is not None and not (isinstance(step, int) and -(1 << 63) <= step < 1 << 63):
        raise InputError("not a step", field="step", found=step, expected="an int of 64 bits, or None")
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise InputError(
                "not text", field=f"metadata[{key!r}]", found=value, expected="str to str", do="pass str(value)"
            )


def check_step(head_step: int | None, step: int | None) -> str:
    """Why a trainer's step does not continue the head; "" when it does."""
    if head_step is not None and step is not None and step <= head_step:
        return f"the run's head is step {head_step}, this is step {step}"
    return ""


@dataclass
class HeldView:
    """One view of the version committed last.

    Attributes:
        name, scheme: of the view.
        table: its tensors, sorted by name.
        digests: per tensor, header term included.
    """

    name: str
    scheme: str
    table: tuple[TensorSpec, ...] = ()
    digests: dict[str, Digest] = field(default_factory=dict)

    @property
    def total(self) -> Digest:
        """Of the whole state."""
        return Digest.sum(self.digests.values())

    def add_to(self, manifest: manifest_pb2.VersionManifest, table: Sequence[TensorSpec],
               reports: Sequence[report_pb2.RankReport]) -> None:  # fmt: skip
        """Adds the view as the ranks report it: digests of all tensors, counts, shards."""
        gained: dict[str, Digest] = {}
        changed: dict[str, int] = {}
        whole: set[str] = set()
        view = manifest.views.add(name=self.name, scheme=self.scheme)
        for report in reports:
            for item in report.tensors:
                name = table[item.tensor].name
                gained[name] = gained.get(name, Digest()) + Digest.from_proto(item.digest)
                changed[name] = changed.get(name, 0) + item.changed
                if item.whole:
                    whole.add(name)
            view.shards.extend(report.shards)
        known = {spec: self.digests[spec.name] for spec in self.table}
        total = Digest()
        for spec in table:
            before = header_digest(spec) if spec.name in whole or spec not in known else known[spec]
            digest = before + gained.get(spec.name, Digest())
            total += digest
            count = changed.get(spec.name, 0)
            view.tensors.add(spec=spec.to_proto(), changed=count, digest=digest.to_proto())
            view.elements += spec.elements
            view.changed += count
        view.digest.CopyFrom(total.to_proto())

    def add_base_to(self, manifest: manifest_pb2.VersionManifest, base: str,
                    entries: Iterable[tuple[TensorSpec, Digest]]) -> None:  # fmt: skip
        """Adds the view as its base checkpoint holds it, by reference."""
        view = manifest.views.add(name=self.name, scheme=self.scheme)
        view.base.uri = os.path.abspath(base)
        for spec, digest in entries:
            view.tensors.add(spec=spec.to_proto(), digest=digest.to_proto())
            view.elements += spec.elements
        view.digest.CopyFrom(Digest.sum(Digest.from_proto(entry.digest) for entry in view.tensors).to_proto())


@dataclass
class Ledger:
    """What is known of the version committed last.

    Attributes:
        views: by name, in the order in which they are published.
        head: number, None in a run without versions.
        step: the trainer's.
        since: versions since the last full state.
        patch_bytes: their patches' bytes, one form of them.
    """

    views: dict[str, HeldView]
    head: int | None = None
    step: int | None = None
    since: int = 0
    patch_bytes: int = 0

    @classmethod
    def of(
        cls,
        head: manifest_pb2.VersionManifest | None,
        schemes: Mapping[str, str],
        lookup: Callable[[int], manifest_pb2.VersionManifest] | None = None,
    ) -> Ledger:
        """Of a run that is opened again.

        Args:
            schemes: of the views, by name.
            lookup: gives older versions, to count what follows the last full state.
        """
        ledger = cls({name: HeldView(name, scheme) for name, scheme in schemes.items()})
        if head is None:
            return ledger
        ledger._adopt(head)
        version = head
        while lookup is not None and version.kind == manifest_pb2.ENTRY_KIND_PATCH:
            ledger._count(version)
            version = lookup(version.parent)
        return ledger

    def committed(self, manifest: manifest_pb2.VersionManifest) -> None:
        """The version becomes the head."""
        self._count(manifest)
        self._adopt(manifest)

    def _count(self, manifest: manifest_pb2.VersionManifest) -> None:
        if manifest.kind == manifest_pb2.ENTRY_KIND_ANCHOR:
            self.since = self.patch_bytes = 0
            return
        self.since += 1
        self.patch_bytes += sum(Entry.of(manifest, name).patch_bytes for name in self.views)

    def _adopt(self, manifest: manifest_pb2.VersionManifest) -> None:
        self.head = manifest.number
        self.step = manifest.step if manifest.HasField("step") else None
        for held in self.views.values():
            view = view_of(manifest, held.name)
            held.table = table_of(view)
            held.digests = {entry.spec.name: Digest.from_proto(entry.digest) for entry in view.tensors}

    @property
    def state_bytes(self) -> int:
        """Bytes of a full state of all views."""
        return sum(spec.nbytes for held in self.views.values() for spec in held.table)

    def manifest(
        self, run: OpenedRun, number: int, step: int | None, metadata: Mapping[str, str], full: bool, writer: str
    ) -> manifest_pb2.VersionManifest:
        """A manifest without views."""
        kind = manifest_pb2.ENTRY_KIND_ANCHOR if full else manifest_pb2.ENTRY_KIND_PATCH
        manifest = manifest_pb2.VersionManifest(
            format=1, run_id=run.run_id, number=number, epoch=run.epoch, kind=kind, metadata=dict(metadata),
            writer=writer, created_unix_ms=time.time_ns() // 1_000_000, nonce=os.urandom(16),
        )  # fmt: skip
        if self.head is not None:
            manifest.parent = self.head
        if step is not None:
            manifest.step = step
        return manifest
