"""TransformersEngine: a Hugging Face model in this process that follows a run and answers with versions attached.

Owns the engine port over one model: its layout, the fence around its decode loop, what it says about itself. Owns no
bits (inplace.py) and no sampling (decoder.py).
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weight_sync.adapters.engines.decoder import Completion, Decoder
from weight_sync.adapters.engines.inplace import InPlaceStore
from weight_sync.adapters.engines.switches import switch_torch
from weight_sync.adapters.engines.unified import Unified
from weight_sync.adapters.engines.unified_decoder import UnifiedDecoder
from weight_sync.canonical import Bits
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.contract import contract_id, process_contract, seal
from weight_sync.errors import EngineError, EngineInDoubtError
from weight_sync.layout.learn import learn_module
from weight_sync.layout.storage import local_storages
from weight_sync.ports import PauseMode, Update
from weight_sync.proto.v1 import common_pb2, contract_pb2, replica_pb2
from weight_sync.push import Placed
from weight_sync.tensors import TensorSpec

__all__ = ["Completion", "TransformersEngine"]


class TransformersEngine:
    """Serves one model in place; implements ``weight_sync.ports.Engine``.

    The model is loaded from the run's base checkpoint, in its dtype, or in float32 from a bf16 one: the served bits are
    then the upper halves, which is for CPUs without bf16 arithmetic. Tied weights are one memory.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        checkpoint: str | Path | Sequence[TensorSpec],
        view: str = "default",
        *,
        engine_id: str | None = None,
        threads: int = 1,
        staging_bytes: int = 4 << 30,
        profile: str = "native",
    ) -> None:
        """
        Args:
            model: a causal language model of transformers.
            checkpoint: the folder it was loaded from, or that folder's table of tensors.
            view: that it serves.
            engine_id: default: host and process.
            threads: that share digests and writes.
            staging_bytes: most memory for whole tensors read ahead of a fence.
            profile: native; deterministic, which sets torch's switches; or unified: `Unified` computes, also for a
                trainer that trains this very model through ``engine.unified``.

        Raises LayoutError when the model is not the checkpoint's, EngineError when unified does not support it, or when the
        model computes with something else than the weights that it was loaded from.
        """
        _refuse_unpacked(model)
        table = Checkpoint(checkpoint).table if isinstance(checkpoint, str | Path) else tuple(checkpoint)
        self.model, self.view = model, view
        self.engine_id = engine_id or f"{socket.gethostname()}-{os.getpid()}"
        self._placed = Placed(learn_module(model, table), lambda: local_storages(model))
        self._store = InPlaceStore(
            self._placed.layout,
            self._placed.storages,
            threads=threads,
            staging_bytes=staging_bytes,
        )
        switch_torch(profile)
        self.unified = Unified(model) if profile == "unified" else None
        self._decoder = Decoder(model) if self.unified is None else UnifiedDecoder(self.unified)
        self._decoder.contract_id = contract_id(self.contract())

    @property
    def version(self) -> common_pb2.VersionId | None:
        """The version that answers carry; None until one is announced."""
        return self._decoder.version

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, **options: Any) -> list[Completion]:
        """See `Decoder.generate`. Threads may call it at the same time, and while a replica syncs."""
        return self._decoder.generate(prompts, max_new_tokens=max_new_tokens, **options)

    def score(self, sequences: Sequence[Sequence[int]], **options: Any) -> list[torch.Tensor]:
        """See `Decoder.score`."""
        return self._decoder.score(sequences, **options)

    # --- the engine port ---

    def describe(self) -> replica_pb2.EngineDescription:
        """What it holds now; the digest is recomputed from the bits, unset when they are no bf16 numbers."""
        message = self.about()
        message.tensors.extend(spec.to_proto() for spec in self._store.table)
        try:
            message.digest.CopyFrom(self._store.audit().to_proto())
        except EngineInDoubtError:
            message.ClearField("digest")
        return message

    def about(self) -> replica_pb2.EngineDescription:
        """The description without what it holds."""
        import transformers

        return replica_pb2.EngineDescription(
            engine_id=self.engine_id,
            kind="transformers",
            view=self.view,
            complete=True,
            forms=[common_pb2.FORM_STEP, common_pb2.FORM_ABSOLUTE],
            contract=self.contract(),
            world_size=1,
            host=socket.gethostname(),
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
        )

    def contract(self) -> contract_pb2.ExecutionContract:
        """How it computes, sealed."""
        import transformers

        sizes: Counter[str] = Counter()
        for spec in self._store.table:
            sizes[spec.dtype] += spec.nbytes
        known: dict[str, Any] = {"served_format": sizes.most_common(1)[0][0].lower()} if sizes else {}
        if self.unified is not None:
            return seal(self.unified.contract(**known))
        return seal(process_contract(
            self.model, **known, tensor_parallel=1, pipeline_parallel=1, expert_parallel=1, data_parallel=1,
            engine="transformers", engine_version=transformers.__version__,
        ))  # fmt: skip

    def bits(self) -> Bits:
        """For patches in the compact form."""
        return self._store.bits()

    def placed(self) -> Placed:
        """Where its weights lie, for transports that write into them."""
        return self._placed

    def stage(self, update: Update) -> None:
        """Makes an update ready while it serves; drops the undo log of the one before."""
        self._store.stage(update, keep_undo=not update.full or self.version is not None)

    def commit(self) -> Digest:
        """Inside the fence: writes the staged update; returns the digest of the bits now in place."""
        return self._store.commit()

    def rollback(self) -> Digest:
        """Inside the fence: restores the bits before the last commit; returns their digest."""
        return self._store.rollback()

    def audit(self) -> Digest:
        """The digest of the whole state, recomputed from the bits in place."""
        return self._store.audit()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Closes admission and settles requests in flight. Raises DeadlineError; admission is as before then."""
        self._decoder.gate.pause(mode, timeout)

    def resume(self) -> None:
        """Opens admission."""
        self._decoder.gate.resume()

    def clear_caches(self) -> None:
        """Keys and values of requests in flight are computed again with the new weights."""
        self._decoder.drop_caches()

    def announce(self, version: common_pb2.VersionId) -> None:
        """The version that answers carry from now on."""
        self._decoder.version = version

    def close(self) -> None:
        """Answers no more; the model stays the caller's."""
        self._decoder.version = None


def _refuse_unpacked(model: torch.nn.Module) -> None:
    """compressed-tensors unpacks codes at the first forward, and then computes with what it unpacked: a version written into
    the codes would be proven by its digest, and never be used.
    """
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is not None:
            raise EngineError("the model unpacks its quantised weights and computes with those", field=name,
                              found=type(module).__name__, expected="weights that are used as they are",
                              do="keep a folder current (weight-sync follow) and load it anew")  # fmt: skip
