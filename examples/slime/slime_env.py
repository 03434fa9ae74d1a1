"""slime from a checkout (SLIME_SRC), importable without a GPU: stubs for what its actor imports and a CPU cannot have.

Owns the stubs and a tiny Megatron model. Real are slime's actor class, updaters, iterators, converters and process
groups, and megatron.core; stubbed are SGLang, triton, torch_memory_saver, megatron.training, and the construction of
model and optimizer. `prepare` runs in every process, Ray's workers included.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import types
import zlib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

STUBBED = ("megatron.training", "triton", "sglang", "sglang_router", "torch_memory_saver")
HIDDEN, LAYERS, HEADS, GROUPS, VOCABULARY, INNER, EXPERTS = 64, 4, 8, 4, 1003, 96, 4


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == stub or name.startswith(stub + ".") for stub in STUBBED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        if spec.name == "torch_memory_saver":
            module.torch_memory_saver.disable = nullcontext
        return module

    def exec_module(self, module: Any) -> None: ...


def prepare() -> types.ModuleType:
    """Makes slime importable here; slime's actor module."""
    if "slime_prepared" in sys.modules:
        return sys.modules["slime.backends.megatron_utils.actor"]
    sys.path.insert(0, os.environ["SLIME_SRC"])
    import torch  # before the finder: its lazy imports look for triton
    import torch._dynamo
    import torch.utils.flop_counter
    from megatron.core.models.gpt import GPTModel  # noqa: F401

    torch.set_num_threads(1)
    sys.meta_path.insert(0, _Finder())
    _cpu_accelerator()
    import slime.backends.megatron_utils.actor as actor

    _without_construction(actor)
    sys.modules["slime_prepared"] = types.ModuleType("slime_prepared")
    return actor


def _cpu_accelerator() -> None:
    import torch
    from slime.utils import accelerator
    from slime.utils.accelerator.base import Accelerator

    def fixed(value: Any) -> Any:
        return lambda self, *a, **k: value

    known = {"is_available": True, "device": torch.device("cpu"), "device_name": "cpu", "current_device": "cpu",
             "device_count": 1, "mem_get_info": (0, 0), "memory_allocated": 0, "memory_reserved": 0}  # fmt: skip
    methods: dict[str, Any] = {name: fixed(known.get(name)) for name in Accelerator.__abstractmethods__}
    methods |= {name: fixed(value) for name, value in known.items()}
    methods |= {"name": "cpu", "device_type": "cpu", "communication_backend_name": "gloo"}
    accelerator.set_accelerator(type("Cpu", (Accelerator,), methods)())


def _without_construction(actor: Any) -> None:
    """slime's ``init`` up to the choice of the updater, around a model of ours."""
    import torch.distributed as dist
    from slime.utils.distributed_utils import init_gloo_group
    from slime.utils.misc import load_function

    def train_ray_actor_init(self: Any, args: Any, role: str, *_: Any) -> None:
        self.args, self.role = args, role
        dist.init_process_group("gloo", f"file://{args.meeting}", rank=int(os.environ["RANK"]),
                                world_size=args.world)  # fmt: skip
        init_gloo_group()
        args.rank = dist.get_rank()

    def init(args: Any) -> None:  # the tail of slime's own, after Megatron's
        from megatron.core import mpu

        tp, pp, ep, _ = args.topology
        mpu.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        load_function(args.custom_megatron_init_path)(args)

    def train_actor(self: Any, rollout_id: int, rollout_data: Any, external_data: Any = None) -> None:
        actor.train(rollout_id, self.model, None, None, None, None, None)

    sys.modules["slime.ray.train_actor"].get_local_gpu_id = lambda: 0  # type: ignore[attr-defined]
    actor.train = lambda rollout_id, model, *_: change(model[0], rollout_id + 1)
    actor.TrainRayActor.init = train_ray_actor_init
    actor.MegatronTrainRayActor.train_actor = train_actor
    actor.MegatronTrainRayActor._get_rollout_data = lambda self, reference: reference
    actor.init = init
    actor.monkey_patch_torch_dist = actor.print_memory = actor.clear_memory = lambda *a, **k: None
    actor.is_megatron_main_rank = lambda: False
    actor.TrainProfiler = MagicMock()
    actor.AutoConfig = MagicMock()
    actor.AutoConfig.from_pretrained.return_value = Namespace(vocab_size=VOCABULARY, quantization_config=None)
    actor.AutoTokenizer = MagicMock()
    actor.TensorBackuper = MagicMock()
    actor.initialize_model_and_optimizer = lambda args, role: ([build(args)], None, None, args.loaded_rollout_id)


def arguments(folder: str, topology: tuple[int, int, int, int], world: int, loaded: int = -1) -> Namespace:
    """As slime's parser and its ``--custom-config-path`` leave them, as far as a sync reads them."""
    import yaml

    args = Namespace(
        topology=topology, world=world, meeting=f"{folder}/meeting{loaded}", hf_checkpoint=f"{folder}/hf",
        loaded_rollout_id=loaded,
        debug_rollout_only=False, debug_train_only=False, colocate=False, update_weight_mode="full",
        update_weight_transport="nccl", num_gpus_per_node=world, offload_train=False, keep_old_actor=False,
        vocab_size=VOCABULARY, model_name="qwen3moe" if topology[3] else "qwen2", update_weights_interval=1,
        rollout_data_postprocess_path=None, use_fault_tolerance=False, use_critic=False, use_opd=False,
        distributed_timeout_minutes=10, tensor_model_parallel_size=topology[0],
        pipeline_model_parallel_size=topology[1], expert_model_parallel_size=topology[2],
        num_experts=EXPERTS if topology[3] else None, num_attention_heads=HEADS, num_query_groups=GROUPS,
        hidden_size=HIDDEN, kv_channels=HIDDEN // HEADS, q_lora_rank=None, update_weight_buffer_size=1 << 20,
        untie_embeddings_and_output_weights=True, custom_megatron_init_path=None,
    )  # fmt: skip
    for key, value in yaml.safe_load(Path(folder, "ws.yaml").read_text()).items():
        setattr(args, key, value)
    return args


def build(args: Any) -> Any:
    """A tiny Megatron GPT under the names that Transformer Engine's layers would have."""
    import torch
    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp, pp, ep, moe = args.topology
    experts: dict[str, Any] = {"num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": INNER // 2,
                               "moe_token_dispatcher_type": "allgather", "moe_grouped_gemm": False} if moe else {}  # fmt: skip
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, ffn_hidden_size=INNER,
        kv_channels=HIDDEN // HEADS, add_bias_linear=False, add_qkv_bias=True, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", use_cpu_initialization=True,
        params_dtype=torch.bfloat16, bf16=True, pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, expert_model_parallel_size=ep, **experts,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm", num_experts=EXPERTS if moe else None, moe_grouped_gemm=False
    )
    model = GPTModel(
        config, spec, vocab_size=1024, max_sequence_length=64, pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(), share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).bfloat16()  # fmt: skip

    class Chunk(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.config = model, config

        def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
            for name, parameter in self.module.named_parameters():
                if not hasattr(parameter, "tensor_model_parallel"):
                    parameter.tensor_model_parallel = False
                yield "module." + _engine_name(name, moe), parameter

    chunk = Chunk()
    for step in range(args.loaded_rollout_id + 2):  # as a checkpoint after that rollout holds it
        change(chunk, step)
    return chunk


def _engine_name(name: str, moe: int) -> str:
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if not moe:
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return re.sub(r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight", r"experts.\2.weight\1", name)


def change(chunk: Any, step: int) -> None:
    """The state of a step: replicas get the same, shards different values. Later steps change every fiftieth element."""
    import torch
    from megatron.core import mpu

    for name, parameter in chunk.named_parameters():
        who = mpu.get_tensor_model_parallel_rank() if parameter.tensor_model_parallel else 0
        if ".experts." in name:
            who = 1 + mpu.get_expert_model_parallel_rank() * 8 + mpu.get_expert_tensor_parallel_rank()
        seed = zlib.crc32(f"{name} {who} {mpu.get_pipeline_model_parallel_rank()} {step}".encode())
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            if step == 0:
                parameter.copy_(torch.randn(parameter.shape, generator=draw).bfloat16())
            else:
                where = torch.rand(parameter.shape, generator=draw) < 0.02
                parameter[where] += 0.5


def say(**facts: Any) -> None:
    """One line of JSON for the test."""
    print("RESULT " + json.dumps(facts), flush=True)
