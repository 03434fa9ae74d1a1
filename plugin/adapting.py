"""A publisher's line of adapters: the base that they are for, and each version's tensors and configuration.

Owns the look-up of the base, the check that a run goes on with the base that it began with, and what may be offered as an
adapter. Owns no names and no checks of tensors (adapter.py), and no publishing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync import config as configuration
from weight_sync.adapter import ADAPTER_CONFIG, AdapterConfig, check_fit, named_base
from weight_sync.checkpoint import Checkpoint, mapped_tensors
from weight_sync.config import Config
from weight_sync.consensus import together
from weight_sync.errors import ConfigError, ForkRequiredError, TensorError, VersionMissingError
from weight_sync.history import table_of, view_of
from weight_sync.ports import Group, Transport
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.registry import find, open_transport
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch

    from weight_sync.served import Source

    Offered: TypeAlias = "Source | AdapterSource | str | os.PathLike[str]"

__all__ = ["AdapterLine", "AdapterSource", "find_base"]

_VERSION = re.compile(r"(?P<uri>.+)@(?P<number>\d+|head)")
_SHARED = {"store_options", "insecure", "tls", "auth", "signing", "timeout_s", "threads", "connections"}


@dataclass(frozen=True)
class AdapterSource:
    """An adapter to publish.

    Attributes:
        tensors: by the names that PEFT saves; whole, or this rank's DTensors.
        config: the text of ``adapter_config.json``.
    """

    tensors: Mapping[str, torch.Tensor]
    config: str

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> AdapterSource:
        """From a folder that PEFT saved; tensors are mapped, not read. Raises TensorError when it is none."""
        file = Path(folder) / ADAPTER_CONFIG
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TensorError(
                "no adapter's folder", field=str(file), found=str(error), do="save it with PEFT"
            ) from error
        return cls(mapped_tensors(Checkpoint(file.parent)), text)


def find_base(config: Config) -> tuple[manifest_pb2.Adapter, tuple[TensorSpec, ...]]:
    """What ``adapter.base`` names, as a message without ``config``, and its tensors.

    Raises ConfigError when there is nothing of that name, VersionError when the store lacks the version.
    """
    given = config.adapter.base
    assert given is not None
    path = Path(given)
    if path.is_file() or any(path.glob("*.safetensors")):
        checkpoint = Checkpoint(path)
        found = manifest_pb2.Adapter(base_digest=checkpoint.digest(config.threads).to_proto())
        found.reference.uri = os.path.abspath(path)
        return found, checkpoint.table
    match = _VERSION.fullmatch(given)
    uri, number = (given, "head") if match is None else (match["uri"], match["number"])
    if "://" not in uri and not Path(uri).exists():
        raise ConfigError("no such base", field="weight_sync.adapter.base", found=given,
                          expected="a folder with *.safetensors, or a store of its versions, URI or URI@N")  # fmt: skip
    keys = config.model_dump(include=_SHARED) | {"uri": uri}
    with closing(open_transport(configuration.load(keys)).replica_end(None)) as reader:
        head = reader.head()
        if head is None:
            raise VersionMissingError("the base's store holds no version", field="weight_sync.adapter.base",
                                      found=given, do="publish the base first")  # fmt: skip
        manifest = reader.manifest(head if number == "head" else int(number))
    if manifest.HasField("adapter"):
        raise ConfigError("the base is itself an adapter", field="weight_sync.adapter.base", found=given,
                          expected="a run of whole models")  # fmt: skip
    view = view_of(manifest, config.adapter.base_view)
    base = common_pb2.VersionId(run_id=manifest.run_id, number=manifest.number)
    found = manifest_pb2.Adapter(base=base, base_view=view.name, base_digest=view.digest)
    found.reference.uri = uri if "://" in uri else os.path.abspath(uri)
    return found, table_of(view)


class AdapterLine:
    """The adapters of one run, on one rank.

    Args:
        base: the message that all versions share.
        table: the base's tensors; on rank 0 only.
    """

    def __init__(self, base: manifest_pb2.Adapter, table: tuple[TensorSpec, ...]) -> None:
        self.base, self._table = base, table
        self._config: AdapterConfig | None = None

    @classmethod
    def open(cls, config: Config, transport: Transport, group: Group) -> AdapterLine | None:
        """None for a run of whole models. Collective, before the run is claimed.

        Raises ForkRequiredError when the run that is to be opened adapts another base, and as `find_base`.
        """
        if config.adapter.base is None:
            return None
        if config.base is not None or config.views:
            raise ConfigError("an adapter's run has no base checkpoint of its own", field="weight_sync.base",
                              found=config.base, do="name the base model by adapter.base alone")  # fmt: skip
        tables: list[tuple[TensorSpec, ...]] = [()]

        def join(_: object) -> bytes:
            base, tables[0] = find_base(config)
            return _continued(config, transport, base).SerializeToString()

        base = manifest_pb2.Adapter.FromString(together(group, bytes, join))
        return cls(base, tables[0])

    def take(self, source: Any) -> Mapping[str, torch.Tensor]:
        """The tensors of what is offered: an AdapterSource, a model that peft has wrapped, or a folder of PEFT's.

        Raises TensorError for anything else, and for an adapter that is no LoRA.
        """
        if isinstance(source, str | os.PathLike):
            source = AdapterSource.load(source)
        elif hasattr(source, "peft_config"):
            source = find("services", "peft")(source)
        if not isinstance(source, AdapterSource):
            raise TensorError("not an adapter", field="source", found=type(source).__name__,
                              expected="a model wrapped by peft, an AdapterSource, or a folder that PEFT saved",
                              do="open the publisher without adapter.base to publish whole models")  # fmt: skip
        self._config = AdapterConfig.read(source.config)
        return source.tensors

    def message(self, table: tuple[TensorSpec, ...]) -> manifest_pb2.Adapter:
        """Of the version whose tensors these are. On rank 0. Raises TensorError when they do not fit the base."""
        assert self._config is not None
        check_fit(self._config, table, self._table)
        found = manifest_pb2.Adapter(config=self._config.text)
        found.MergeFrom(self.base)
        return found


def _continued(config: Config, transport: Transport, base: manifest_pb2.Adapter) -> manifest_pb2.Adapter:
    """How the run spells this base. Raises ForkRequiredError when it has another one."""
    if config.fork and config.run_id is None:
        return base
    with closing(transport.replica_end(config.run_id)) as reader:
        try:
            head = reader.head()
        except VersionMissingError:
            return base
        if head is None:
            return base
        manifest = reader.manifest(head)
    if not manifest.HasField("adapter"):
        raise ForkRequiredError("the run's versions are whole models", field="adapter.base", found=config.adapter.base,
                                do="give adapters a uri of their own")  # fmt: skip
    known = manifest.adapter
    if known.base_digest != base.base_digest:
        raise ForkRequiredError(
            "the run's adapters are for another base", field="adapter.base", found=named_base(base),
            expected=named_base(known), do="name that base, or fork: true to start a new run on the new one",
        )  # fmt: skip
    known.ClearField("config")
    return known
