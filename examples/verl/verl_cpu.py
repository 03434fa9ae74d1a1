"""What verl lacks to run without an accelerator: a CPU platform, and a rollout that generates with transformers.

Owns doubles of verl's platform and rollout; loaded into every process by VERL_USE_EXTERNAL_MODULES. Everything else
is verl's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _module() -> types.ModuleType:
    """torch.cpu with what verl expects of a device module."""
    shim = types.ModuleType("torch_cpu_shim")
    for name in dir(torch.cpu):
        setattr(shim, name, getattr(torch.cpu, name))
    for name in ("empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "reset_peak_memory_stats",
                 "synchronize", "set_device"):  # fmt: skip
        setattr(shim, name, lambda *a, **k: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(shim, name, lambda *a, **k: 0)
    known = {"get_device_name": "CPU", "is_available": True, "device_count": 1, "current_device": 0,
             "mem_get_info": (8 << 30, 16 << 30)}  # fmt: skip
    for name, value in known.items():
        setattr(shim, name, lambda *a, _value=value, **k: _value)
    shim.get_rng_state = lambda *a, **k: torch.get_rng_state()  # type: ignore[attr-defined]
    shim.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)  # type: ignore[attr-defined]
    return shim


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """Chosen by VERL_PLATFORM=cpu."""

    device_name = vendor_name = "cpu"
    device_module = _module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None: ...

    def synchronize(self, index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, message: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _one_gloo() -> None:
    """verl asks for "cpu:gloo,<device>:<backend>", which names the CPU twice here."""
    original = torch.distributed.init_process_group

    def init(backend: str | None = None, *args: Any, **options: Any) -> Any:
        return original("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **options)

    torch.distributed.init_process_group = init


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """A hash of each tensor's bits."""
    out = {}
    for name, tensor in tensors.items():
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        out[name] = hashlib.blake2b(raw, digest_size=16).hexdigest()
    return out


def _rollout() -> None:
    """Registers the rollout ``hfcpu``."""
    import ray
    from verl.workers.rollout import base
    from verl.workers.rollout.base import BaseRollout
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
    from verl.workers.rollout.utils import ensure_async_iterator

    class Server:
        """One replica's model; says what it holds after each load."""

        def __init__(self, path: str, rank: int, config: Any) -> None:
            from transformers import AutoModelForCausalLM

            torch.set_num_threads(1)
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
            self.rank, self.config, self.step = rank, config, None
            self.open = asyncio.Event()
            self.open.set()

        def address(self) -> str:
            return f"127.0.0.1:{50000 + self.rank}"

        async def load_weights(self, named: list[tuple[str, torch.Tensor]], step: int) -> None:
            state = self.model.state_dict()
            for name, tensor in named:
                state[name].copy_(tensor)
            self.step = step
            folder = os.environ.get("WEIGHT_SYNC_TEST_OUT")
            if folder:
                held = bits({name: state[name] for name, _ in named})
                lines = "".join(f"{name} {value}\n" for name, value in sorted(held.items()))
                Path(folder, f"rollout-{self.rank}-step-{step}.txt").write_text(lines)

        async def generate(self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **_: Any) -> Any:
            await self.open.wait()
            limit = self.config.response_length
            wanted = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens") or limit
            return await asyncio.to_thread(self._generate, list(prompt_ids), max(1, min(wanted, limit)))

        @torch.no_grad()
        def _generate(self, ids: list[int], count: int) -> Any:
            tokens: list[int] = []
            likely: list[float] = []
            for _ in range(count):
                scores = torch.log_softmax(self.model(input_ids=torch.tensor([ids + tokens])).logits[0, -1].float(), -1)
                tokens.append(int(torch.multinomial(scores.exp(), 1)))
                likely.append(float(scores[tokens[-1]]))
            return TokenOutput(token_ids=tokens, log_probs=likely, stop_reason="completed",
                               extra_fields={"global_steps": self.step})  # fmt: skip

        async def abort_all_requests(self, reject_request: bool = False) -> None:
            self.open.clear()

        async def resume_generation(self) -> None:
            self.open.set()

        async def nothing(self, *_: Any, **__: Any) -> None: ...

        clear_kv_cache = release_kv_cache = resume_kv_cache = wake_up = sleep = nothing
        start_profile = stop_profile = set_global_steps = nothing

    class Adapter(BaseRollout):  # type: ignore[misc]
        """Runs in verl's CheckpointEngineWorker; hands what our engine yields to the server."""

        def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
            super().__init__(config, model_config, device_mesh)
            self.replica_rank, self.is_leader_rank = replica_rank, True

        async def resume(self, tags: list[str]) -> None: ...

        async def release(self) -> None: ...

        async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
            server = ray.get_actor(f"hfcpu_server_{self.replica_rank}")
            named = [(name, tensor.clone()) async for name, tensor in ensure_async_iterator(weights)]
            await server.load_weights.remote(named, global_steps)

    class Replica(RolloutReplica):  # type: ignore[misc]
        async def launch_servers(self) -> None:
            name = f"hfcpu_server_{self.replica_rank}"
            made = ray.remote(Server).options(name=name, max_concurrency=100, num_cpus=1)
            self._server_handle = made.remote(self.model_config.path, self.replica_rank, self.config)
            self.servers = [self._server_handle]
            self._server_address = await self._server_handle.address.remote()

    # verl looks the adapter up by name
    globals()["Adapter"] = Adapter
    base._ROLLOUT_REGISTRY[("hfcpu", "async")] = "verl_cpu.Adapter"
    RolloutReplicaRegistry.register("hfcpu", lambda: Replica)


if os.environ.get("VERL_PLATFORM") == "cpu":
    _one_gloo()
    _rollout()
