"""What is inside one file or checkpoint folder: a shard's index and frames, or a table of tensors.

Owns those summaries for `weight-sync inspect`. Owns no store.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.cli.options import Common
from weight_sync.cli.output import Output, share, size
from weight_sync.errors import FormatError

if TYPE_CHECKING:
    from weight_sync.codec.shard import ShardHead

__all__ = ["describe", "show"]

_ROWS = 40  # of a table for people; JSON has all


def describe(path: Path, common: Common, digest: bool) -> dict[str, Any]:
    """The file's content as JSON; a shard is told by its index, whatever the file is called."""
    from weight_sync.tensors import RESERVED_PREFIX

    if path.is_file() and f'"{RESERVED_PREFIX}index"'.encode() in _header(path):
        return _shard(path, common)
    return _checkpoint(path, common, digest)


def _header(path: Path) -> bytes:
    """The JSON of a safetensors file. Raises FormatError when the file is too short to be one."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(path.stat().st_size - 8, 100 << 20):
            raise FormatError("not a safetensors file", field=str(path), found=f"{path.stat().st_size} bytes",
                              do="name a shard, a safetensors file, a folder of them, or a store")  # fmt: skip
        return stream.read(length)


# --- shards ---


def _shard(path: Path, common: Common) -> dict[str, Any]:
    import numpy as np

    from weight_sync.codec.frame import hash16
    from weight_sync.codec.shard import parse_head
    from weight_sync.proto.v1 import common_pb2

    data = np.memmap(path, np.uint8, "r").data
    head = parse_head(data, len(data))
    wanted = [frame.blake3 for frame in head.index.frames] + [piece.blake3 for piece in head.index.pieces]
    spans = [*head.frame_spans, *head.piece_spans]
    right: list[bool] = []
    with common.out.progress("hashes", "frames") as update:
        for (offset, length), want in zip(spans, wanted, strict=True):
            right.append(hash16([data[offset : offset + length]]) == want)
            update(len(right), len(spans))
    index = head.index
    form = common_pb2.Form.Name(index.form).removeprefix("FORM_")
    frames = _frames(head, right)
    pieces = _pieces(head, right[len(frames) :])
    changes, stored = sum(row["changes"] for row in frames), sum(row["bytes"] for row in frames)
    return {
        "file": str(path),
        "kind": "shard",
        "bytes": path.stat().st_size,
        "run_id": index.run_id,
        "number": index.number,
        "rank": index.rank,
        "view": index.view,
        "form": form,
        "tensors": len(head.specs),
        "changes": changes,
        "bits_per_change": 8 * stored / changes if changes else None,
        "frames": frames,
        "pieces": pieces,
        "ok": all(right),
    }


def _frames(head: ShardHead, right: list[bool]) -> list[dict[str, Any]]:
    rows = []
    for k, frame in enumerate(head.index.frames):
        specs = [head.specs[region.tensor] for region in frame.regions if region.tensor < len(head.specs)]
        rows.append(
            {
                "frame": k,
                "dtype": specs[0].dtype if specs else None,
                "boxes": len(frame.regions),
                "tensors": list(dict.fromkeys(spec.name for spec in specs)),
                "elements": frame.elements,
                "changes": frame.changes,
                "density": frame.changes / frame.elements if frame.elements else 0.0,
                "bytes": frame.size,
                "bits_per_change": 8 * frame.size / frame.changes if frame.changes else None,
                "hash_ok": right[k],
            }
        )
    return rows


def _pieces(head: ShardHead, right: list[bool]) -> list[dict[str, Any]]:
    return [
        {
            "tensor": head.specs[piece.region.tensor].name,
            "dtype": head.specs[piece.region.tensor].dtype,
            "shape": list(head.specs[piece.region.tensor].shape),
            "elements": box.count,
            "bytes": span[1],
            "hash_ok": ok,
        }
        for piece, box, span, ok in zip(head.index.pieces, head.boxes, head.piece_spans, right, strict=True)
    ]


# --- safetensors ---


def _checkpoint(path: Path, common: Common, digest: bool) -> dict[str, Any]:
    from weight_sync.checkpoint import Checkpoint

    checkpoint = Checkpoint(path)
    document: dict[str, Any] = {
        "file": str(path),
        "kind": "checkpoint",
        "files": len(set(checkpoint.files.values())),
        "bytes": sum(spec.nbytes for spec in checkpoint.table),
        "elements": sum(spec.elements for spec in checkpoint.table),
        "dtypes": dict(Counter(spec.dtype for spec in checkpoint.table)),
        "tensors": [
            {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.nbytes,
             "file": checkpoint.files[spec.name].name}
            for spec in checkpoint.table
        ],
    }  # fmt: skip
    if digest:
        from weight_sync.codec.digest import Digest
        from weight_sync.config import default_threads

        done, total = Digest(), 0
        with common.out.progress("digest") as update:
            for spec, part in checkpoint.digests(threads=common.keys.get("threads") or default_threads()):
                done, total = done + part, total + spec.nbytes
                update(total, document["bytes"])
        document["digest"] = done.hex()
    return document


# --- for people ---


def show(out: Output, document: dict[str, Any]) -> None:
    """Prints what `describe` found."""
    if document["kind"] == "shard":
        _show_shard(out, document)
        return
    dtypes = ", ".join(f"{count} {name}" for name, count in document["dtypes"].items())
    pairs = [("checkpoint", document["file"]), ("files", str(document["files"])),
             ("tensors", f"{len(document['tensors'])}: {dtypes}"),
             ("size", f"{document['elements']} elements, {size(document['bytes'])}")]  # fmt: skip
    if "digest" in document:
        pairs.append(("digest", document["digest"]))
    out.facts(pairs)
    rows = [[row["name"], row["dtype"], _shape(row["shape"]), size(row["bytes"])] for row in document["tensors"]]
    _table(out, ["tensor", "dtype", "shape", ("size", "right")], rows)


def _show_shard(out: Output, document: dict[str, Any]) -> None:
    bits = document["bits_per_change"]
    changes = f"{document['changes']}" + ("" if bits is None else f", {bits:.2f} bits each")
    out.facts([
        ("shard", document["file"]), ("size", size(document["bytes"])),
        ("run", document["run_id"]), ("version", str(document["number"])),
        ("view", f"{document['view']}, rank {document['rank']}"),
        ("form", document["form"]), ("tensors", str(document["tensors"])), ("changes", changes),
        ("hashes", "right" if document["ok"] else "WRONG"),
    ])  # fmt: skip
    frames = [
        [str(row["frame"]), row["dtype"] or "", str(row["boxes"]), str(row["elements"]), str(row["changes"]),
         share(row["density"]), size(row["bytes"]), f"{row['bits_per_change'] or 0:.2f}", _verdict(row)]
        for row in document["frames"]
    ]  # fmt: skip
    if frames:
        _table(out, ["frame", "dtype", ("boxes", "right"), ("elements", "right"), ("changes", "right"),
                     ("density", "right"), ("size", "right"), ("bits each", "right"), "hash"], frames)  # fmt: skip
    pieces = [
        [row["tensor"], row["dtype"], _shape(row["shape"]), str(row["elements"]), size(row["bytes"]), _verdict(row)]
        for row in document["pieces"]
    ]
    if pieces:
        _table(out, ["whole tensor", "dtype", "shape", ("elements", "right"), ("size", "right"), "hash"], pieces)


def _table(out: Output, columns: list[Any], rows: list[list[str]]) -> None:
    out.table(columns, rows[:_ROWS])
    if len(rows) > _ROWS:
        out.text(f"... and {len(rows) - _ROWS} more (--json lists all)")


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _verdict(row: dict[str, Any]) -> str:
    return "right" if row["hash_ok"] else "WRONG"
