"""Where a checkpoint that an engine loaded by name lies on this host.

Owns the look-up. Owns no download: what the engine loaded is here already.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["local_checkpoint"]


def local_checkpoint(name: str, revision: str | None) -> Path | None:
    """The folder of a path or of a name on the hub; None when it holds no safetensors, or is not here."""
    if Path(name).is_dir():
        return Path(name) if any(Path(name).glob("*.safetensors")) else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
