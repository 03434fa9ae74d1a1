"""FP8 e4m3 in blocks, as DeepSeek's, GLM's and Qwen's checkpoints hold it: ``weight`` and ``weight_scale_inv``.

Owns the arithmetic of ``quant_method: fp8`` with ``weight_block_size``, bit for bit that of transformers' own quantiser
(which imports the whole of transformers and takes whole weights only). Owns no other scheme.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weight_sync.errors import ConfigError, TensorError
from weight_sync.quantize.weights import Output, QuantizedWeight, served
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["BlockFp8"]

_CODES = "F8_E4M3"
_LARGEST = 448.0
_SCALE = ".weight_scale_inv"


class BlockFp8:
    """Made for one base.

    Args:
        config: ``quantization_config`` of the base's config.json.
        dtype: of the weights before quantisation, a safetensors spelling of 16 bits.

    Raises ConfigError for a form of fp8 that is none of this scheme.
    """

    def __init__(self, config: Mapping[str, Any], dtype: str) -> None:
        block = config.get("weight_block_size")
        self._whole = block is None  # one scale per matrix
        if not self._whole and not (isinstance(block, Sequence) and len(block) == 2 and min(block) > 0):
            raise ConfigError("not a block size", field="weight_block_size", found=block, expected="[rows, columns]")
        if config.get("fmt", "e4m3") != "e4m3":
            raise ConfigError("fp8 of another kind", field="fmt", found=config["fmt"], expected="e4m3")
        self._block = (1, 1) if block is None else (int(block[0]), int(block[1]))
        self._power_of_two = config.get("scale_fmt") == "ue8m0"
        self._dtype = dtype
        self.scheme = "fp8-tensor" if self._whole else f"fp8-block-{self._block[0]}x{self._block[1]}"

    def weights(self, table: Mapping[str, TensorSpec]) -> Sequence[QuantizedWeight]:
        """All tensors of fp8, with their scales. Raises TensorError when one lacks them or they do not fit."""
        found: list[QuantizedWeight] = []
        for spec in table.values():
            if spec.dtype != _CODES:
                continue
            if not spec.name.endswith(".weight") or len(spec.shape) < 2:
                raise TensorError("fp8 tensor is no weight", field=spec.name, found=list(spec.shape),
                                  expected="a matrix, or a stack of them, named *.weight")  # fmt: skip
            scale = served(table, spec.name.removesuffix(".weight") + _SCALE, spec.name)
            if scale.dtype not in (("F32", "F8_E8M0") if self._power_of_two else ("F32",)):
                raise TensorError("not a scale of this scheme", field=scale.name, found=scale.dtype, expected="F32")
            block = (spec.shape[-2], spec.shape[-1]) if self._whole else self._block
            outputs = (Output("codes", spec, (1, 1), codes=True), Output("scale", scale, block))
            found.append(QuantizedWeight(TensorSpec(spec.name, self._dtype, spec.shape), outputs, (block,)))
        return found

    def constants(self, table: Mapping[str, TensorSpec]) -> Collection[str]:
        """Static scales of activations."""
        return [name for name in table if name.endswith((".input_scale", ".activation_scale"))]

    def project(
        self, weight: QuantizedWeight, values: torch.Tensor, extrema: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Mapping[str, torch.Tensor]:
        """Codes of ``values``, whole blocks of (rows, columns), and the blocks' scales."""
        import torch

        low, high = extrema[-1]
        largest = torch.maximum(low.abs(), high.abs()).to(torch.float32)
        one = torch.ones_like(largest)
        forward = torch.where(largest > 0, _LARGEST / torch.where(largest > 0, largest, one), one)
        inverse = 1.0 / forward
        if self._power_of_two:
            tiny = torch.finfo(torch.float32).tiny
            inverse = torch.pow(2.0, torch.ceil(torch.log2(inverse.clamp(min=tiny))))
            forward = 1.0 / inverse
        down, across = largest.shape
        height, width = values.shape[0] // down, values.shape[1] // across
        blocks = values.to(torch.float32).reshape(down, height, across, width) * forward[:, None, :, None]
        codes = blocks.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).reshape(values.shape)
        dtype = weight.outputs[1].spec.type.torch
        return {"codes": codes, "scale": inverse.to(dtype)}
