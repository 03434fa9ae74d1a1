"""VllmEngine: a running vLLM server as an engine, driven over the control socket that our plugin opens in it.

Owns the names: socket, routes, kind. Owns no protocol (worker/control.py) and no weight.
"""

from __future__ import annotations

from weight_sync.adapters.engines.vllm.adapters import VllmAdapters
from weight_sync.adapters.engines.vllm.door import SUFFIX
from weight_sync.adapters.engines.worker.control import SocketControl
from weight_sync.adapters.engines.worker.remote import RemoteEngine
from weight_sync.config import Config

__all__ = ["VllmEngine"]

_HINT = (
    'start it with --weight-transfer-config \'{"backend": "weight_sync"}\' on this host, as the same user, in an '
    "environment that has weight-sync installed"
)


class VllmEngine(RemoteEngine):
    """An implementation of ``weight_sync.ports.Engine``.

    Args:
        url: of the server, for example ``http://127.0.0.1:8000``; the server runs on this host.
        config: ``base`` names the checkpoint where the server has none of its own; ``cache_dir`` and ``staging_bytes``
            bound where versions are laid out for its workers; ``fence_s`` is the limit of each call inside a fence.

    Attributes:
        control_routes: prefixes of the server's routes that change weights, memory or admission.
        adapters: the server's own API for LoRA adapters; driven by another thread than the engine.
    """

    kind = "vllm"
    control_routes: tuple[str, ...] = (
        "/abort_requests",
        "/collective_rpc",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/load_lora_adapter",
        "/v1/load_lora_adapter",
        "/pause",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/scale_elastic_ep",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_profile",
        "/start_weight_update",
        "/stop_profile",
        "/unload_lora_adapter",
        "/v1/unload_lora_adapter",
        "/update_weight_version",
        "/update_weights",
        "/wake_up",
        "/weight_checker",
    )

    def __init__(self, url: str, config: Config) -> None:
        """Opens nothing yet. Raises ConfigError for a URL that cannot be used."""
        self.adapters = VllmAdapters(SocketControl(url, "vLLM", SUFFIX, _HINT), url)
        super().__init__(SocketControl(url, "vLLM", SUFFIX, _HINT), config, url)
