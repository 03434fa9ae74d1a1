"""Signatures over manifests: Ed25519, made by the publisher, checked by every reader that trusts keys.

Owns what is signed and the check. Owns no key: they are files that the configuration names. A manifest lists hashes of
all its objects, so a signature covers everything that a version stores.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weight_sync.config import Signing
from weight_sync.errors import ConfigError, CorruptionError
from weight_sync.proto.v1 import manifest_pb2

__all__ = ["checker", "signed_bytes", "signer"]

Check = Callable[[manifest_pb2.VersionManifest], None]


def signed_bytes(manifest: manifest_pb2.VersionManifest) -> bytes:
    """What is signed: the deterministic serialisation of the manifest without its signature."""
    bare = manifest_pb2.VersionManifest()
    bare.CopyFrom(manifest)
    bare.ClearField("signature")
    return bare.SerializeToString(deterministic=True)


def signer(keys: Signing) -> Check:
    """A function that signs a manifest in place; does nothing without a key. Raises ConfigError."""
    if keys.key is None:
        return lambda manifest: None
    if not keys.key_id:
        raise ConfigError("missing key", field="weight_sync.signing.key_id", do="name the key as readers know it")
    private = _load(keys.key, "weight_sync.signing.key", "load_pem_private_key", password=None)

    def sign(manifest: manifest_pb2.VersionManifest) -> None:
        signature = private.sign(signed_bytes(manifest))
        manifest.signature.CopyFrom(manifest_pb2.Signature(key_id=keys.key_id, ed25519=signature))

    return sign


def checker(keys: Signing) -> Check | None:
    """A function that raises CorruptionError for a manifest that no trusted key has signed; None when none is named.

    Raises ConfigError.
    """
    if not keys.trusted:
        return None
    public = {
        name: _load(path, f"weight_sync.signing.trusted.{name}", "load_pem_public_key")
        for name, path in keys.trusted.items()
    }

    def check(manifest: manifest_pb2.VersionManifest) -> None:
        from cryptography.exceptions import InvalidSignature

        given = manifest.signature
        name = f"version {manifest.number}"
        if given.key_id not in public:
            raise CorruptionError("version is not signed by a trusted key", field=name,
                                  found=given.key_id or "no signature", expected=" or ".join(sorted(public)),
                                  do="do not trust this store, or add the key to signing.trusted")  # fmt: skip
        try:
            public[given.key_id].verify(given.ed25519, signed_bytes(manifest))
        except InvalidSignature as error:
            raise CorruptionError("signature does not fit the manifest", field=name, found=given.key_id,
                                  do="do not trust this store") from error  # fmt: skip

    return check


def _load(path: str, field: str, loader: str, **options: Any) -> Any:
    """An Ed25519 key of a PEM file."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError("signatures need cryptography", field=field, do="pip install 'weight-sync[grpc]'") from error
    try:
        key = getattr(serialization, loader)(Path(path).read_bytes(), **options)
    except OSError as error:
        raise ConfigError("cannot read the key", field=field, found=f"{path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError("not an unencrypted PEM key", field=field, found=path) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey):
        raise ConfigError("not an Ed25519 key", field=field, found=type(key).__name__)
    return key
