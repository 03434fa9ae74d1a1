"""MergedEngine: the embedded engine with a LoRA adapter merged into its weights, following the adapter's run.

Owns the adapter's bits, the base's bits of what is adapted, and the merge: W + scaling * (B @ A), as PEFT's
``PeftModel.from_pretrained(base, folder).merge_and_unload()`` computes it, bit for bit. Owns no sampling and no fence
(transformers.py), and no names (weight_sync.adapter).

The base must not move while an adapter is merged: `close` gives it back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weight_sync.adapter import AdapterConfig, Pair, adapter_of, base_text, check_base, pairs_of
from weight_sync.adapters.engines.decoder import Completion
from weight_sync.adapters.engines.transformers import TransformersEngine
from weight_sync.canonical import Bits
from weight_sync.checkpoint import as_torch
from weight_sync.codec.apply import apply_changes, write_dense
from weight_sync.codec.digest import Digest, digest_tensor
from weight_sync.errors import EngineError, EngineInDoubtError, TensorError
from weight_sync.ports import Engine, PauseMode, Update
from weight_sync.proto.v1 import common_pb2, replica_pb2
from weight_sync.served import bits_of
from weight_sync.tensors import TensorSpec

__all__ = ["MergedEngine"]


@dataclass(frozen=True)
class _Adapter:
    """One version of an adapter.

    Attributes:
        bits: by name, (elements,) unsigned.
        digest: of all of them.
    """

    config: AdapterConfig | None = None
    table: tuple[TensorSpec, ...] = ()
    bits: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    digest: Digest = field(default_factory=Digest)

    def add_to(self, weight: torch.Tensor, pair: Pair) -> None:
        """As PEFT does it: it widens 16-bit factors when it loads them, and rounds the sum once, to the weight's dtype; of
        embeddings it rounds what it adds, too.
        """
        assert self.config is not None
        down, up = (as_torch(spec, self.bits[spec.name]).to(weight.device) for spec in (pair.down, pair.up))
        if down.dtype in (torch.float16, torch.bfloat16):
            down, up = down.float(), up.float()
        product = up @ down
        turned = product.T if pair.embedding or self.config.transposed else product
        delta = turned * self.config.scaling(pair.module)
        weight += delta.to(weight.dtype) if pair.embedding else delta


class MergedEngine(Engine):
    """An implementation of ``weight_sync.ports.Engine`` for runs of adapters; answers by ``engine``'s decoder.

    Args:
        engine: holds the base, whole and in its own version.
        threads: that compute digests.

    Raises EngineInDoubtError when it cannot be told what the engine holds.
    """

    def __init__(self, engine: TransformersEngine, *, threads: int = 1) -> None:
        self._engine, self._threads = engine, threads
        self._base, self._base_version = engine.audit(), engine.version
        self._announced = engine.version  # whoever else announces a version has moved the base
        self._originals: dict[str, torch.Tensor] = {}  # by module
        self._now = _Adapter()
        self._undo: _Adapter | None = None
        self._staged: tuple[_Adapter, dict[str, torch.Tensor]] | None = None

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, **options: Any) -> list[Completion]:
        """See `Decoder.generate`; answers carry versions of the adapter."""
        return self._engine.generate(prompts, max_new_tokens=max_new_tokens, **options)

    @property
    def version(self) -> common_pb2.VersionId | None:
        """Of the adapter, that answers carry; None until one is announced."""
        return self._engine.version

    # --- the port ---

    def describe(self) -> replica_pb2.EngineDescription:
        """The adapter that is merged, if one is; no tensors are listed, for any adapter to the base is taken."""
        message = self._engine.about()
        if self._now.table:
            message.digest.CopyFrom(self.audit().to_proto())
        return message

    def bits(self) -> Bits:
        """For patches in the compact form."""
        held = self._now.bits
        return lambda spec: held[spec.name]

    def stage(self, update: Update) -> None:
        """Merges while the model serves. Raises WrongBaseError for an adapter to another base, EngineError."""
        self._staged = self._undo = None
        self._check_still()
        message = adapter_of(update.manifest)
        check_base(message, self._base_version, self._base)
        try:
            config = AdapterConfig.read(message.config)
            pairs, rest = pairs_of(update.tensors)
        except TensorError as error:
            raise EngineError("not an adapter that can be merged", field=error.field, found=str(error)) from error
        bits = self._stepped(update)
        more = [*config.beyond, *(name for name in rest if not self._is_the_bases(name, bits[name]))]
        if more:
            raise EngineError("the adapter is more than two factors to a weight", field=more[0],
                              do="load it by an engine's own adapters, or publish merged weights")  # fmt: skip
        digest = Digest.sum(digest_tensor(spec, bits[spec.name], self._threads) for spec in update.tensors)
        adapter = _Adapter(config, update.tensors, bits, pairs, digest)
        for pair in pairs:
            self._keep(pair, config)
        self._staged = adapter, dict(self._merged(adapter))

    def _check_still(self) -> None:
        """Raises EngineInDoubtError when another replica has moved the base under the adapter."""
        if self._engine.version != self._announced:
            raise EngineInDoubtError("the base was moved under a merged adapter", field="version",
                                     found=base_text(self._engine.version, None),
                                     expected=base_text(self._announced, None),
                                     do="load the base anew; let one replica alone drive an engine")  # fmt: skip

    def _stepped(self, update: Update) -> dict[str, npt.NDArray[Any]]:
        """The adapter's bits after an update."""
        old = {} if update.full else self._now.bits
        known = {spec.name: spec for spec in self._now.table}
        out = {
            spec.name: old[spec.name].copy() if spec.name in old and known[spec.name] == spec
            else np.zeros(spec.elements, spec.type.uint)
            for spec in update.tensors
        }  # fmt: skip
        for piece in update.dense():
            write_dense(piece, out[piece.spec.name], piece.coords, keep_old=False)
        for changes in update.changes:
            apply_changes(changes, out[changes.spec.name], changes.coords)
        return out

    def _is_the_bases(self, name: str, bits: npt.NDArray[Any]) -> bool:
        """Whether a tensor is a copy of what the base has, as PEFT saves of embeddings that are adapted."""
        module = name.removeprefix("base_model.model.").removesuffix(".base_layer.weight")
        if not name.endswith(".base_layer.weight"):
            return False
        held = self._originals.get(module)
        try:
            weight = self._weight(module) if held is None else held
        except AttributeError:
            return False
        return np.array_equal(bits_of(weight.cpu()), bits)

    def _weight(self, module: str) -> torch.Tensor:
        weight = self._engine.model.get_submodule(module).weight
        assert isinstance(weight, torch.Tensor)
        return weight.detach()

    def _keep(self, pair: Pair, config: AdapterConfig) -> None:
        """The base's bits of what is adapted. Raises EngineError when the model has no such weight."""
        if pair.module in self._originals:
            return
        try:
            weight = self._weight(pair.module)
        except AttributeError as error:
            raise EngineError("the model lacks what is adapted", field=pair.weight, found=str(error),
                              do="adapt modules of the base model by their own names") from error  # fmt: skip
        if tuple(weight.shape) != pair.shape(config):
            raise EngineError("the adapter does not fit the model's weight", field=pair.weight,
                              found=list(pair.shape(config)), expected=list(weight.shape))  # fmt: skip
        self._originals[pair.module] = weight.clone()

    def _merged(self, adapter: _Adapter) -> Iterator[tuple[str, torch.Tensor]]:
        """By module, the weights that the model computes with under this adapter: the base's where it adapts nothing."""
        pairs = {pair.module: pair for pair in adapter.pairs}
        for module, original in self._originals.items():
            weight = original.clone()
            if module in pairs:
                adapter.add_to(weight, pairs[module])
            yield module, weight

    def _write(self, weights: Mapping[str, torch.Tensor] | Iterator[tuple[str, torch.Tensor]]) -> None:
        for module, weight in weights.items() if isinstance(weights, Mapping) else weights:
            self._weight(module).copy_(weight)

    def commit(self) -> Digest:
        """Inside the fence: the model computes with the merged weights; the adapter's digest.

        Raises EngineError after having restored the weights before, EngineInDoubtError when it could not.
        """
        staged, self._staged = self._staged, None
        if staged is None:
            raise EngineError("nothing is staged", do="call stage first")
        adapter, weights = staged
        try:
            self._write(weights)
        except Exception as error:
            self._go_to(self._now)
            raise EngineError("commit failed, the old weights are back", found=str(error)) from error
        self._undo, self._now = self._now, adapter
        return adapter.digest

    def _go_to(self, adapter: _Adapter) -> None:
        try:
            self._write(self._merged(adapter))
        except Exception as error:
            raise EngineInDoubtError("the weights before could not be restored", found=str(error),
                                     do="load the base anew") from error  # fmt: skip
        self._now = adapter

    def rollback(self) -> Digest:
        """Inside the fence: the adapter before, merged again from the base's bits. May be called again."""
        if self._undo is None:
            raise EngineInDoubtError("the undo log is gone", do="sync again")
        self._go_to(self._undo)
        return self._now.digest

    def audit(self) -> Digest:
        """The adapter's digest, recomputed, after its merge was computed anew and compared with the model's weights.

        Raises EngineInDoubtError when the model holds something else there, or when somebody else has announced a version.
        """
        self._check_still()
        for module, weight in self._merged(self._now):
            if not torch.equal(self._weight(module).view(torch.uint8), weight.view(torch.uint8)):  # NaN equals itself
                raise EngineInDoubtError("the model's weights are not the base's and the adapter's", field=module,
                                         do="load the base anew: somebody else has changed it")  # fmt: skip
        return Digest.sum(digest_tensor(spec, self._now.bits[spec.name], self._threads) for spec in self._now.table)

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Closes admission and settles requests in flight. Raises DeadlineError; admission is as before then."""
        self._engine.pause(mode, timeout)

    def resume(self) -> None:
        """Opens admission."""
        self._engine.resume()

    def clear_caches(self) -> None:
        """Keys and values of requests in flight are computed again."""
        self._engine.clear_caches()

    def announce(self, version: common_pb2.VersionId) -> None:
        """The adapter's version, that answers carry from now on."""
        self._engine.announce(version)
        self._announced = version

    def close(self) -> None:
        """The base's own weights are back; nothing is answered until a version is announced.

        A base that was moved meanwhile is left as it is: the old weights in it would be a mixture.
        """
        if self._engine.version == self._announced:
            self._write(self._originals)
        self._now = _Adapter()
        self._engine.close()
