"""What the tests of quantised views share: a trainer's weights, and full checkpoints quantised by the formats' libraries.

Owns no claim. Each `Case` quantises whole bf16 weights with its library, which is what a host's own full export does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

LINEAR = ("layers.0.q_proj.weight", "layers.0.mlp.weight", "layers.1.q_proj.weight")


def masters(step: int) -> Tensors:
    """fp32 masters, copied: three matrices, a norm, an embedding, an fp32 leftover and a table of integers; all move."""
    return {name: tensor.clone() for name, tensor in _masters(step).items()}


@cache
def _masters(step: int, rate: float = 3e-4) -> Tensors:
    dice = torch.Generator().manual_seed(11)
    shapes = {LINEAR[0]: (256, 128), LINEAR[1]: (128, 384), LINEAR[2]: (256, 128), "embed.weight": (64, 128)}
    found = {name: torch.randn(shape, generator=dice) * 0.05 for name, shape in shapes.items()}
    found |= {"norm.weight": torch.ones(128), "router.bias": torch.zeros(8)}
    for k in range(step):
        for tensor in found.values():
            tensor += rate * torch.randn(tensor.shape, generator=dice)
        found[LINEAR[0]][k, 0] = 0.5 + 0.1 * k  # an element that moves its block's scale
    return {**found, "steps": torch.arange(4) + step}


def plain(step: int) -> Tensors:
    """The unquantised checkpoint of a step: bf16, but for the leftovers."""
    keep = ("router.bias", "steps")
    return {name: tensor if name in keep else tensor.bfloat16() for name, tensor in masters(step).items()}


@dataclass(frozen=True)
class Case:
    """One scheme.

    Attributes:
        config: ``quantization_config`` of the base.
        quantize: one bf16 weight by the format's library: the served tensors by the suffix that replaces ``weight``.
        scheme: as reports and manifests name it.
    """

    name: str
    config: Mapping[str, Any]
    quantize: Callable[[torch.Tensor], Tensors]
    scheme: str

    def checkpoint(self, step: int) -> Tensors:
        """The full checkpoint of a step."""
        found: Tensors = {}
        for name, tensor in plain(step).items():
            if name not in LINEAR:
                found[name] = tensor
                continue
            for suffix, part in self.quantize(tensor).items():
                found[name.removesuffix("weight") + suffix] = part.contiguous()
        return found

    def write_base(self, folder: Path, change: Callable[[Tensors], None] | None = None, **config: Any) -> Path:
        """The checkpoint of step 0 as a folder."""
        folder.mkdir()
        tensors = self.checkpoint(0)
        if change is not None:
            change(tensors)
        save_file(tensors, folder / "model.safetensors")
        quantization = {**self.config, **config}
        (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": quantization}))
        return folder


# --- fp8 in blocks, by transformers ---


def _transformers(scale_fmt: str, block: list[int] | None) -> Callable[[torch.Tensor], Tensors]:
    def quantize(weight: torch.Tensor) -> Tensors:
        from types import SimpleNamespace

        from transformers.integrations.finegrained_fp8 import Fp8Quantize

        config = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
        found = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"x.weight": weight})
        return {"weight": found["x.weight"], "weight_scale_inv": found["x.weight_scale_inv"]}

    return quantize


def _fp8(name: str, block: list[int] | None, scheme: str, scale_fmt: str = "float") -> Case:
    config = {"quant_method": "fp8", "weight_block_size": block, "fmt": "e4m3", "scale_fmt": scale_fmt}
    return Case(name, config, _transformers(scale_fmt, block), scheme)


# --- compressed-tensors ---


def _library(form: str, weights: Mapping[str, Any]) -> Callable[[torch.Tensor], Tensors]:
    """The library's own scales of a whole weight, and its compressor."""

    def quantize(weight: torch.Tensor) -> Tensors:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import (
            calculate_qparams,
            compute_dynamic_scales_and_zp,
            generate_gparam,
        )

        args = QuantizationArgs.model_validate(weights)
        state = {"weight": weight}
        whole = None
        if args.strategy == "tensor_group":
            whole = state["weight_global_scale"] = generate_gparam(*torch.aminmax(weight))
        if args.strategy == "channel":
            scale, zero = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), args)
        elif args.strategy == "block":
            height, width = args.block_structure
            blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height))
            scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
        else:
            scale, zero = compute_dynamic_scales_and_zp(weight, args, torch.nn.Module(), whole)
        state |= {"weight_scale": scale, "weight_zero_point": zero}
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        found: Tensors = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
        return {name: tensor for name, tensor in found.items() if args.symmetric is False or "zero" not in name}

    return quantize


def _compressed(name: str, form: str, scheme: str, **weights: Any) -> Case:
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return Case(name, config, _library(form, weights), scheme)


FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int"}
F8 = {"num_bits": 8, "type": "float", "symmetric": True}

FP8 = _fp8("fp8-block", [128, 128], "fp8-block-128x128")
CASES = {case.name: case for case in (
    FP8,
    _fp8("fp8-block-ue8m0", [128, 128], "fp8-block-128x128", "ue8m0"),
    _fp8("fp8-tensor", None, "fp8-tensor"),
    _compressed("ct-fp8-tensor", "float-quantized", "fp8-tensor", **F8, strategy="tensor"),
    _compressed("ct-fp8-channel", "float-quantized", "fp8-channel", **F8, strategy="channel"),
    _compressed("ct-fp8-block", "float-quantized", "fp8-block-128x128", **F8, strategy="block",
                block_structure=[128, 128]),
    _compressed("int4-group", "pack-quantized", "int4-group-32", **INT4, strategy="group", group_size=32,
                symmetric=True),
    _compressed("int4-group-asymmetric", "pack-quantized", "int4-group-32", **INT4, strategy="group", group_size=32,
                symmetric=False),
    _compressed("int4-channel", "pack-quantized", "int4-channel", **INT4, strategy="channel", symmetric=True),
    _compressed("nvfp4", "nvfp4-pack-quantized", "nvfp4", **FP4, strategy="tensor_group", group_size=16,
                scale_dtype="torch.float8_e4m3fn", zp_dtype="torch.float8_e4m3fn"),
    _compressed("mxfp4", "mxfp4-pack-quantized", "mxfp4", **FP4, strategy="group", group_size=32,
                scale_dtype="torch.uint8", zp_dtype="torch.uint8"),
    _compressed("int8-channel", "int-quantized", "int8-channel", num_bits=8, type="int", symmetric=True,
                strategy="channel"),
)}  # fmt: skip
