"""What one rank of OpenRLHF's policy publishes, and how its rollout engines follow.

Owns the step counter, the choice between merged weights and the adapter alone, and telling the engines. Owns no shard
map (weight_sync.adapters.trainers.deepspeed) and no publishing (weight_sync.adapters.trainers.base).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weight_sync.adapters.trainers.base import TrainerHost
from weight_sync.adapters.trainers.block import read_block
from weight_sync.adapters.trainers.deepspeed import gather_adapter, hold
from weight_sync.adapters.trainers.lora import adapter_config
from weight_sync.adapters.trainers.metrics import PREFIX
from weight_sync.adapting import AdapterSource
from weight_sync.config import Config
from weight_sync.consensus import together
from weight_sync.contract.facts import distribution_version
from weight_sync.errors import ConfigError, EngineError
from weight_sync.group import default_group
from weight_sync.ports import Group
from weight_sync.publisher import Publisher
from weight_sync.served import HeldTensors

__all__ = ["OpenRlhfHost", "checkpoint_folder", "make_host", "reachable"]


class OpenRlhfHost(TrainerHost):
    """One rank.

    Args:
        model: the module that DeepSpeed trains.
        engines: handles of OpenRLHF's rollout actors; the same on every rank.
        step: of the host, that the model is at.
        lora: "merge" or "adapter": what is published of a model that peft has wrapped.

    Attributes:
        metrics: of the last sync, for the host's next log line.
    """

    host = "openrlhf"

    def __init__(
        self, config: Config, group: Group, model: Any, engines: Sequence[Any], step: int,
        tensor_parallel: bool = False, lora: str = "merge",
    ) -> None:  # fmt: skip
        super().__init__(config, group)
        self.metrics: dict[str, float] = {}
        self._model, self._engines, self._tensor_parallel = model, list(engines), tensor_parallel
        self._adapter_only = lora == "adapter" and hasattr(model, "peft_config")
        self._step = step
        self._resumes = step > 0  # OpenRLHF then syncs once before it trains
        self._followed = False

    def execution(self) -> dict[str, Any]:
        """Of the module that DeepSpeed trains."""
        return {
            "model": self._model, "engine_version": distribution_version("openrlhf"),
            "kernel_versions": {"deepspeed": distribution_version("deepspeed")},
            **({} if self._tensor_parallel else {"tensor_parallel": 1, "data_parallel": self._group.size}),
        }  # fmt: skip

    def source(self) -> HeldTensors | AdapterSource:
        """What this rank holds; collective where something has to be gathered."""
        if self._adapter_only:
            return AdapterSource(gather_adapter(self._model, self.paths), adapter_config(self._model))
        return hold(self._model, self._group, self.paths, self._tensor_parallel)

    def attach(self) -> None:
        """Opens the run and checks names and shapes before anything is trained; collective. Raises as `sync` would.

        A run of adapters has no checkpoint to begin from: what training starts from goes out, or nobody could answer.
        """
        publisher = self.publisher
        if self._adapter_only and publisher.version is None and not self._resumes:
            self.sync(self._step)
            return
        source = self._offered()
        if not self._holds_head(publisher, source, self._step) and publisher.version is not None:
            found = publisher.recognise(source)
            self.log.info("the trainer starts from %s", "no version of the run: what differs will be part of the next one"
                          if found is None else f"version {found}")  # fmt: skip
        self._tell_paths()

    def broadcast(self) -> None:
        """OpenRLHF's sync point. Raises what must stop the job; anything else is in `metrics`."""
        if not self._resumes:
            self._step += 1
        self._resumes = False
        found = self.sync(self._step)
        self.metrics = found if self.config.overlap else found | self._reach()

    def _fleet(self) -> dict[str, float]:
        # with overlap the engines are told now, while no version is in flight: of the one before
        reached = self._reach() if self.config.overlap else {}
        return super()._fleet() | reached

    def _wait_for(self, publisher: Publisher, replicas: int) -> None:
        self._reach()  # they are replicas, too, and would not move before they are told
        super()._wait_for(publisher, replicas)

    def _reach(self) -> dict[str, float]:
        """Brings the engines to the version committed last; metrics, on every rank. Collective, and so a barrier.

        Raises EngineError when an engine cannot follow at all.
        """
        target = self.publisher.version
        if not self._engines or target is None:
            return {}

        def tell(_: object) -> bytes:
            import ray

            where = reachable(self.config.uri, ray.util.get_node_ip_address())
            calls = [engine.weight_sync_reach.remote(where, self.publisher.run_id, target) for engine in self._engines]
            return json.dumps(ray.get(calls)).encode()

        answers = json.loads(together(self._group, bytes, tell))
        behind = [answer for answer in answers if answer["error"]]
        for answer in behind:
            self.log.error("%s stays at version %s: %s", answer["name"], answer["version"], answer["error"])
        if behind and not self._followed:
            raise EngineError("rollout engines cannot follow", field=behind[0]["name"], found=behind[0]["error"],
                              expected=f"version {target}", do="look at the engine's log")  # fmt: skip
        self._followed = True
        spent = [answer["seconds"] for answer in answers]
        return {
            PREFIX + "engines_behind": float(len(behind)),
            PREFIX + "engines_copied": float(max(answer["copied"] for answer in answers)),
            PREFIX + "seconds_engines": max(spent),
        }


def make_host(actor: Any, block: Mapping[str, Any], lora: str, pretrain: str) -> OpenRlhfHost:
    """In a policy actor that has loaded its model; a collective call of all its ranks. Raises as `OpenRlhfHost.attach`."""
    args = actor.strategy.args
    model = actor.trainer.actor.model.module
    adapter_only = lora == "adapter" and hasattr(model, "peft_config")
    folder = checkpoint_folder(str(block.get("base") or pretrain))
    named = (block.get("adapter") or {}).get("base") or block.get("adapter.base")
    hosts = str(block.get("backend", "")) in ("grpc", "rdma") or str(block["uri"]).partition("://")[0] in (
        "grpc",
        "rdma",
    )
    config = read_block(
        {key: value for key, value in block.items() if key != "base"},
        base=None if adapter_only else folder,
        store=str(Path(args.ckpt.path).absolute() / "weight_sync") if hosts else None,
        view="adapter" if adapter_only else None,
        base_hf_id=pretrain if folder != pretrain else None,
        **({"adapter.base": folder} if adapter_only and not named else {}),
    )
    step = int((actor.checkpoint_states or {}).get("global_step") or 0)
    tensor_parallel = int(getattr(args.ds, "tensor_parallel_size", 1)) > 1
    if adapter_only and actor.vllm_engines and not config.rollout.engines:
        raise ConfigError("OpenRLHF's own engines serve merged weights", field="weight_sync.lora", found="adapter",
                          expected="merge", do="set it to merge; or weight_sync.rollout.engines, which serve the adapter "
                          "under the name that weight_sync.rollout.model says")  # fmt: skip
    host = OpenRlhfHost(config, default_group(config.timeout_s), model, actor.vllm_engines or (), step,
                        tensor_parallel, lora)  # fmt: skip
    from openrlhf.utils.logging_utils import init_logger

    host.log = init_logger("weight_sync.openrlhf")  # in the host's own log, as the host writes it
    host.attach()
    return host


def checkpoint_folder(name: str) -> str:
    """The folder of a checkpoint that transformers has loaded by path or hub name. Raises ConfigError."""
    if Path(name).is_dir():
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(name, local_files_only=True, allow_patterns=["*.safetensors*", "*.json"]))
    except (LocalEntryNotFoundError, ValueError) as error:
        raise ConfigError("no checkpoint to check names against", field="weight_sync.base", found=name,
                          expected="a folder of safetensors files",
                          do="set weight_sync.base to the folder that engines boot from") from error  # fmt: skip


def reachable(uri: str, address: str) -> str:
    """The address of a server for those who are elsewhere; one that names its host, and a store's, stay as they are."""
    scheme, found, rest = uri.partition("://")
    host, colon, port = rest.rpartition(":")
    if not found or host not in ("0.0.0.0", "[::]", "") or not colon:
        return uri
    return f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}"
