"""SglangEngine: a running SGLang server as an engine, driven over the control socket that our plugin opens in it.

Owns the names: socket, routes, kind. Owns no protocol (worker/control.py) and no weight.
"""

from __future__ import annotations

from weight_sync.adapters.engines.sglang.adapters import SglangAdapters
from weight_sync.adapters.engines.sglang.door import SUFFIX
from weight_sync.adapters.engines.worker.control import SocketControl
from weight_sync.adapters.engines.worker.remote import RemoteEngine
from weight_sync.config import Config

__all__ = ["SglangEngine"]

_HINT = (
    "start it on this host, as the same user, in an environment that has weight-sync installed, and wait until it has "
    "answered a first request; SGLANG_PLUGINS must be unset or name weight_sync"
)


class SglangEngine(RemoteEngine):
    """An implementation of ``weight_sync.ports.Engine``.

    Args:
        url: of the server, for example ``http://127.0.0.1:30000``; the server runs on this host.
        config: ``base`` names the checkpoint where the server has none of its own; ``cache_dir`` and ``staging_bytes``
            bound where versions are laid out for its ranks; ``fence_s`` is the limit of each call inside a fence.

    Attributes:
        control_routes: prefixes of the server's routes that change weights, memory or admission.
        adapters: the server's own API for LoRA adapters; driven by another thread than the engine.
    """

    kind = "sglang"
    control_routes: tuple[str, ...] = (
        "/abort_request",
        "/add_external_corpus",
        "/begin_weight_update",
        "/configure_logging",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/dump_expert_distribution_record",
        "/dumper",
        "/end_weight_update",
        "/flush_cache",
        "/freeze_gc",
        "/get_remote_instance_transfer_engine_info",
        "/get_weights_by_name",
        "/hicache",
        "/init_weights",
        "/load_lora_adapter",
        "/pause_generation",
        "/pd_role_switch",
        "/release_memory_occupation",
        "/remote_instance_transfer_engine_info",
        "/remove_external_corpus",
        "/resume_memory_occupation",
        "/scale_elastic_ep",
        "/send_weights_to_remote_instance",
        "/set_internal_state",
        "/set_trace_level",
        "/slow_down",
        "/start_expert_distribution_record",
        "/start_profile",
        "/stop_expert_distribution_record",
        "/stop_profile",
        "/unload_lora_adapter",
        "/update_weight",
        "/weights_checker",
    )

    def __init__(self, url: str, config: Config) -> None:
        """Opens nothing yet. Raises ConfigError for a URL that cannot be used."""
        self.adapters = SglangAdapters(SocketControl(url, "SGLang", SUFFIX, _HINT), url)
        super().__init__(SocketControl(url, "SGLang", SUFFIX, _HINT), config, url)
