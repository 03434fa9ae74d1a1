"""Names of objects: how they are made, and which of them a manifest may point at.

Owns every key that this transport writes (docs/store.md is the same list for people). Owns no I/O.
"""

from __future__ import annotations

import re

from weight_sync.config import check_name
from weight_sync.errors import ConfigError, FormatError

__all__ = [
    "LATEST",
    "RUNS",
    "ack",
    "acks",
    "check_object",
    "check_run_id",
    "entry",
    "lease",
    "leases",
    "log",
    "number_in",
    "probe",
    "rejected",
    "run_record",
    "shard",
    "stem",
    "trajectories",
    "under",
    "want",
    "wants",
]

RUNS = "runs"
LATEST = "latest"

_OBJECT = re.compile(r"data/([0-9]{20})/[A-Za-z0-9][A-Za-z0-9._-]{0,400}\.safetensors")


def check_run_id(run_id: str) -> str:
    """``run_id`` when it may name a folder of the store. Raises ConfigError."""
    check_name("run_id", run_id)
    if run_id in (RUNS, LATEST):
        raise ConfigError("reserved name", field="run_id", found=run_id, do="choose another name")
    return run_id


def run_record(sequence: int) -> str:
    """Record number ``sequence`` of the register of runs."""
    return f"{RUNS}/{sequence:08d}.pb"


def log(run_id: str) -> str:
    """Folder of the log."""
    return f"{run_id}/log"


def entry(run_id: str, number: int) -> str:
    """Entry ``number`` of the log."""
    return f"{run_id}/log/{number:020d}.pb"


def shard(number: int, epoch: int, rank: int, label: str, token: str) -> str:
    """A shard, below the run's prefix. ``token`` is random: a second try never meets the first one's object."""
    check_name("label", label)
    return f"data/{number:020d}/{epoch}-{rank}-{label}-{token}.safetensors"


def under(run_id: str, key: str) -> str:
    """``key`` below the run's prefix as a key of the store."""
    return f"{run_id}/{key}"


def leases(run_id: str) -> str:
    """Folder of the leases."""
    return f"{run_id}/leases"


def lease(run_id: str, replica_id: str) -> str:
    """The lease of a replica."""
    return f"{run_id}/leases/{check_name('replica_id', replica_id)}.pb"


def acks(run_id: str) -> str:
    """Folder of the acknowledgements."""
    return f"{run_id}/acks"


def ack(run_id: str, replica_id: str) -> str:
    """The last acknowledgement of a replica."""
    return f"{run_id}/acks/{check_name('replica_id', replica_id)}.pb"


def wants(run_id: str) -> str:
    """Folder of the requests for anchors."""
    return f"{run_id}/wants"


def want(run_id: str, replica_id: str) -> str:
    """A replica's request for the bits of an anchor."""
    return f"{run_id}/wants/{check_name('replica_id', replica_id)}.pb"


def trajectories(run_id: str) -> str:
    """Folder of the batches of trajectories, one folder per sender in it."""
    return f"{run_id}/trajectories"


def rejected(run_id: str, key: str) -> str:
    """Where an unreadable object of the run goes."""
    return f"{run_id}/rejected/{key.removeprefix(run_id + '/').replace('/', '.')}"


def probe(run_id: str) -> str:
    """Written to learn the store's time."""
    return f"{run_id}/probe"


def stem(key: str) -> str:
    """Last part of a key, without its extension."""
    return key.rsplit("/", 1)[-1].removesuffix(".pb")


def number_in(key: str) -> int | None:
    """The number that an entry or a shard (any key of the store) belongs to; None when it is neither."""
    match = re.search(r"(?:^|/)(?:log/([0-9]{20})\.pb|data/([0-9]{20})/[^/]+)$", key)
    return int(match[1] or match[2]) if match else None


def check_object(key: str, number: int | None, where: str) -> str:
    """``key`` of a shard reference when it stays in the folder of its version. Raises FormatError.

    Args:
        key: below the run's prefix, as a manifest gives it; not to be trusted.
        number: of the version, None when any will do.
        where: name of the manifest, for the message.
    """
    match = _OBJECT.fullmatch(key)
    if match is None or ".." in key or (number is not None and int(match[1]) != number):
        folder = f"data/{number:020d}/" if number is not None else "data/<number>/"
        raise FormatError(
            f"shard outside its version's folder in {where}",
            field="object",
            found=key,
            expected=f"{folder}<name>.safetensors",
            do="do not trust this store",
        )
    return key
