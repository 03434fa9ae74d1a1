"""The weight-transfer engine ``weight_sync``: what ``--weight-transfer-config '{"backend": "weight_sync"}'`` names.

Owns the registration of the worker's door. vLLM's own weight-transfer calls carry no answer, so versions do not travel
through them: they are refused with the reason. Imported by vLLM inside a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.v1.worker.worker_base import WorkerBase

from weight_sync.adapters.engines.vllm.extension import put_on
from weight_sync.errors import EngineError

__all__ = ["WeightSyncTransfer"]


@dataclass
class _Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    pass


@dataclass
class _NoUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    pass


def _refuse() -> EngineError:
    return EngineError("versions reach this server through weight_sync's own socket", field="weight transfer",
                       do="run weight-sync sidecar --engine vllm against this server")  # fmt: skip


class WeightSyncTransfer(WeightTransferEngine[_Nothing, _NoUpdate]):  # type: ignore[misc]
    """Opens the worker's door when vLLM makes it, after the model was loaded."""

    init_info_cls = _Nothing
    update_info_cls = _NoUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        put_on(WorkerBase)

    def init_transfer_engine(self, init_info: _Nothing) -> None:
        """Nothing to be initialised."""

    def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise _refuse()

    def receive_weights(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise _refuse()

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise _refuse()

    def shutdown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Refused: the trainer's end is `weight_sync.Publisher`."""
        raise _refuse()
