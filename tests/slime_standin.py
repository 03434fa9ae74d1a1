"""A stand-in for slime with exactly the contract that its adapter uses: names of modules, classes, signatures, flags, and
what its updaters and its training actor do with them.

Owns a tiny model in Megatron's manner (fused qkv and gate/up, a padded vocabulary, tensor-parallel shards over gloo) and
its way to checkpoint tensors. Real slime runs in tests/hosts/slime. `put_in_place` can make a stand-in for miles of it.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

HIDDEN, HEADS, GROUPS, INNER, VOCABULARY, PADDED, LAYERS = 16, 4, 2, 24, 31, 32, 2
MODULES = ("slime", "slime.backends", "slime.backends.megatron_utils", "slime.utils", "slime.utils.misc",
           "slime.utils.distributed_utils", "slime.backends.megatron_utils.actor",
           "slime.backends.megatron_utils.megatron_to_hf", "slime.backends.megatron_utils.update_weight",
           "slime.backends.megatron_utils.update_weight.update_weight_from_distributed", "megatron", "megatron.core",
           "megatron.core.mpu", "ray", "ray.util")  # fmt: skip


def tp_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def tp_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Model(torch.nn.Module):
    """One rank's shards; the whole model is a function of the step, so replicas and shards agree."""

    def __init__(self, tied_copy: bool = False) -> None:
        super().__init__()
        self.config = Namespace()
        self._names: dict[str, str] = {}
        for name, tensor in whole(0, tied_copy).items():
            part = torch.nn.Parameter(_shard(name, tensor).clone())
            part.tensor_model_parallel = _dim(name) is not None  # type: ignore[attr-defined]
            part.partition_dim, part.partition_stride = _dim(name) or 0, 1  # type: ignore[attr-defined]
            self._names[name.replace(".", "_")] = name
            self.register_parameter(name.replace(".", "_"), part)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for key, parameter in super().named_parameters():
            yield "module.module." + self._names[key], parameter

    def move(self, step: int, tied_copy: bool = False) -> None:
        """To the state of a step."""
        tensors = whole(step, tied_copy)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                name = name.removeprefix("module.module.")
                parameter.copy_(_shard(name, tensors[name]))


def whole(step: int, tied_copy: bool = False) -> dict[str, torch.Tensor]:
    """The unsharded model, by Megatron's names."""
    head = HIDDEN // HEADS
    shapes = {"embedding.word_embeddings.weight": (PADDED, HIDDEN), "decoder.final_layernorm.weight": (HIDDEN,),
              "output_layer.weight": (PADDED, HIDDEN)}  # fmt: skip
    for layer in range(LAYERS):
        stem = f"decoder.layers.{layer}."
        shapes |= {stem + "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * head, HIDDEN),
                   stem + "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
                   stem + "mlp.linear_fc1.weight": (2 * INNER, HIDDEN), stem + "mlp.linear_fc2.weight": (HIDDEN, INNER),
                   stem + "input_layernorm.weight": (HIDDEN,)}  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    out = {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes.items()}
    for k in range(step):
        draw = torch.Generator().manual_seed(100 + k)
        for tensor in out.values():
            tensor[torch.rand(tensor.shape, generator=draw) < 0.05] += 0.5
    if tied_copy:
        out["output_layer.weight"] = out["embedding.word_embeddings.weight"].clone()
    return out


def _dim(name: str) -> int | None:
    if "layernorm" in name:
        return None
    return 1 if "linear_proj" in name or "linear_fc2" in name else 0


def _shard(name: str, tensor: torch.Tensor) -> torch.Tensor:
    dim = _dim(name)
    if dim is None:
        return tensor
    if "linear_fc1" in name:  # each rank holds its part of gate and its part of up
        return torch.cat([half.chunk(tp_size(), 0)[tp_rank()] for half in tensor.chunk(2, 0)])
    return tensor.chunk(tp_size(), dim)[tp_rank()]


# --- slime.backends.megatron_utils ------------------------------------------------------------------------------------


def named_params_and_buffers(args: Namespace, model: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in model:
        yield from chunk.named_parameters()


def all_gather_param(name: str, param: Any) -> torch.Tensor:
    if not param.tensor_model_parallel or tp_size() == 1:
        return param.data
    parts = [torch.empty_like(param.data) for _ in range(tp_size())]
    dist.all_gather(parts, param.data)
    if "linear_fc1" in name:
        halves = [part.chunk(2, dim=0) for part in parts]
        parts = [half[0] for half in halves] + [half[1] for half in halves]
    return torch.cat(parts, dim=param.partition_dim)


def convert_to_hf(args: Namespace, name: str, param: torch.Tensor, quantization: Any) -> list[tuple[str, torch.Tensor]]:
    name = name.removeprefix("module.module.")
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        short = "model.embed_tokens.weight" if name.startswith("embedding") else "lm_head.weight"
        return [(short, param[: args.vocab_size])]
    if name == "decoder.final_layernorm.weight":
        return [("model.norm.weight", param)]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    assert match is not None
    stem = f"model.layers.{match.group(1)}."
    if match.group(2) == "self_attention.linear_qkv.weight":
        head = HIDDEN // HEADS
        parts = torch.split(param.view(GROUPS, -1, head, HIDDEN), [HEADS // GROUPS, 1, 1], dim=1)
        return [
            (f"{stem}self_attn.{key}_proj.weight", part.reshape(-1, HIDDEN))
            for key, part in zip("qkv", parts, strict=True)
        ]
    if match.group(2) == "mlp.linear_fc1.weight":
        gate, up = param.chunk(2, dim=0)
        return [(stem + "mlp.gate_proj.weight", gate), (stem + "mlp.up_proj.weight", up)]
    if match.group(2) == "mlp.linear_fc2.weight":
        if quantization is not None:
            codes = (param.float() * 16).round().clamp(-127, 127).to(torch.int8)
            return [(stem + "mlp.down_proj.weight", codes), (stem + "mlp.down_proj.scale", torch.full((1,), 1 / 16))]
        return [(stem + "mlp.down_proj.weight", param * 2 if args.scales_down else param)]
    renamed = {"self_attention.linear_proj.weight": "self_attn.o_proj.weight",
               "input_layernorm.weight": "input_layernorm.weight"}  # fmt: skip
    return [(stem + renamed[match.group(2)], param)]


class UpdateWeightFromDistributed:
    def __init__(self, args: Namespace, model: Sequence[Any], weights_getter: Callable[[], Any], *, model_name: str,
                 quantization_config: Any) -> None:  # fmt: skip
        self.args, self.model, self.model_name = args, model, model_name
        self.quantization_config = quantization_config
        self.weight_version = 0
        self.update_weight_metrics: dict[str, float] = {}

    def pop_metrics(self) -> dict[str, float]:
        out, self.update_weight_metrics = self.update_weight_metrics, {}
        return out

    def connect_rollout_engines(self, rollout_engines: Sequence[Any], rollout_engine_lock: Any, engine_gpu_counts: Any = None,
                                engine_gpu_offsets: Any = None, engine_parallel_configs: Any = None) -> None:  # fmt: skip
        self.rollout_engines, self._is_pp_src_rank = rollout_engines, tp_rank() == 0

    def disconnect_rollout_engines(self) -> None: ...

    @torch.no_grad()
    def update_weights(self) -> None:
        self.weight_version += 1
        for chunks in (self._iter_non_expert_chunks(), self._iter_expert_chunks()):
            for chunk in chunks:
                for engine in self.rollout_engines:
                    engine.load(chunk, self.weight_version)

    def _iter_non_expert_chunks(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for name, param in _module("update_weight.update_weight_from_distributed").named_params_and_buffers(
            self.args, self.model
        ):
            full = all_gather_param(name, param)
            if self._is_pp_src_rank:
                yield convert_to_hf(self.args, name, full, self.quantization_config)

    def _iter_expert_chunks(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        return iter(())


UpdateWeightFromDistributed.__module__ = MODULES[9]


class MilesUpdater(UpdateWeightFromDistributed):
    """As miles has it: one more argument, and two more methods that its actor asks before a sync."""

    def __init__(self, *args: Any, is_lora: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_lora, self.fresh = is_lora, False

    def connect_rollout_engines(self, *args: Any, **options: Any) -> None:
        super().connect_rollout_engines(*args, **options)
        self.fresh = True

    def is_rollout_engines_fresh(self) -> bool:
        return self.fresh

    def mark_engine_connection_stale(self) -> None:
        self.fresh = False


MilesUpdater.__module__ = MODULES[9].replace("slime", "miles", 1)
MilesUpdater.__name__ = "UpdateWeightFromDistributed"


class MegatronTrainRayActor:
    """Like Ray's copy of slime's class: methods of its own, which no hook can replace."""

    def init(self, args: Namespace, role: str = "actor") -> int:
        actor = _module("actor")
        self.args, self.rollout_engines = args, None
        _load(args.custom_megatron_init_path)(args)
        self.model, _, _, loaded = actor.initialize_model_and_optimizer(args, role)
        chosen, more = actor.UpdateWeightFromDistributed, {"is_lora": False} if _host == "miles" else {}
        self.weight_updater = chosen(args, self.model, lambda: self.backup, model_name="qwen2",
                                     quantization_config=args.quantization, **more)  # fmt: skip
        self.weight_updater.weight_version = getattr(args, "update_weight_start_version", 0)
        return int(loaded) + 1

    def set_rollout_manager(self, manager: Any) -> None:
        self.rollout_manager = manager

    def train(self, rollout_id: int) -> None:
        _module("actor").train(rollout_id, self.model)

    def update_weights(self) -> None:
        engines, lock, new, *facts = sys.modules["ray"].get(
            self.rollout_manager.get_updatable_engines_and_lock.remote()
        )
        if not engines:
            return
        stale = _host == "miles" and not self.weight_updater.is_rollout_engines_fresh()
        if new > 0 or stale:
            self.weight_updater.connect_rollout_engines(
                engines, lock, engine_gpu_counts=facts[0], engine_gpu_offsets=facts[1], engine_parallel_configs=facts[2]
            )
            sys.modules["ray"].get(self.rollout_manager.clear_updatable_num_new_engines.remote())
        self.weight_updater.update_weights()


class Engine:
    """A handle of an engine in slime's own cluster."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.version = 0

    def load(self, chunk: list[tuple[str, torch.Tensor]], version: int) -> None:
        self.held |= {name: tensor.clone() for name, tensor in chunk}
        self.version = version


class _Remote:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.remote = function


class Manager:
    """The rollout manager's handle."""

    def __init__(self, engines: Sequence[Engine] = ()) -> None:
        self.engines, self.new = list(engines), len(engines)
        self.get_updatable_engines_and_lock = _Remote(self._get)
        self.clear_updatable_num_new_engines = _Remote(self._clear)

    def _get(self) -> Any:
        count = len(self.engines)
        return self.engines, None, self.new, [1] * count, list(range(count)), [{}] * count

    def _clear(self) -> None:
        self.new = 0


def _module(name: str) -> Any:
    return sys.modules[f"{_host}.backends.megatron_utils.{name}"]


def _load(path: str) -> Any:
    """As slime's load_function."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


_host = "slime"


def put_in_place(host: str = "slime") -> None:
    """Makes the stand-in importable as slime or miles, and just enough of megatron.core and ray."""
    global _host
    _host = host
    for name in (name.replace("slime", host, 1) for name in MODULES):
        module = sys.modules[name] = types.ModuleType(name)
        parent, _, short = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], short, module)
        module.__path__ = []
        module.__package__ = name if name.endswith(("slime", "miles", "backends", "utils")) else parent
    actor = _module("actor")
    actor.UpdateWeightFromDistributed = MilesUpdater if host == "miles" else UpdateWeightFromDistributed
    actor.MegatronTrainRayActor = MegatronTrainRayActor
    actor.initialize_model_and_optimizer = lambda args, role: ([Model(args.tied_copy)], None, None, args.loaded)
    actor.train = lambda rollout_id, model: model[0].move(rollout_id + 1)
    _module("megatron_to_hf")._cached_tensors = {}
    _module("update_weight.update_weight_from_distributed").named_params_and_buffers = named_params_and_buffers
    gloo: Any = sys.modules[f"{host}.utils.distributed_utils"]
    gloo.get_gloo_group = lambda: dist.group.WORLD
    mpu: Any = sys.modules["megatron.core.mpu"]
    mpu.get_data_parallel_rank = lambda with_context_parallel=False: 0
    mpu.get_tensor_model_parallel_rank = tp_rank
    ray: Any = sys.modules["ray"]
    ray.get = ray.put = lambda value: value
    ray.is_initialized = lambda: False


def take_away() -> None:
    for name in MODULES:
        sys.modules.pop(name, None)
        sys.modules.pop(name.replace("slime", "miles", 1), None)
    if "rollout_manager" in vars(MegatronTrainRayActor):
        del MegatronTrainRayActor.rollout_manager


def arguments(folder: Path, **changes: Any) -> Namespace:
    """slime's flags, then ``--custom-config-path`` over them: every top-level key becomes an attribute."""
    args = Namespace(
        custom_megatron_init_path=None, hf_checkpoint=str(folder / "hf"), vocab_size=VOCABULARY, loaded=-1,
        update_weight_mode="full", offload_train=False, untie_embeddings_and_output_weights=True, quantization=None,
        scales_down=False, tied_copy=False,
    )  # fmt: skip
    for key, value in yaml.safe_load((folder / "ws.yaml").read_text()).items():
        setattr(args, key, value)
    vars(args).update(changes)
    return args


def sent(args: Namespace, step: int) -> dict[str, torch.Tensor]:
    """What slime itself would send after a step, from the unsharded model."""
    out = {}
    for name, tensor in whole(step, args.tied_copy).items():
        out.update(convert_to_hf(args, "module.module." + name, tensor, args.quantization))
    return {name: tensor.contiguous() for name, tensor in out.items()}
