"""The formats of compressed-tensors: fp8 by tensor, channel, group or block, packed int4 and int8, NVFP4 and MXFP4.

Owns how the library's parameters map onto cells and blocks. Owns no arithmetic: scales and codes are the library's own,
called on what a rank holds. The library imports transformers, so it is imported when the first such view is opened.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weight_sync.errors import ConfigError, TensorError
from weight_sync.quantize.weights import Output, QuantizedWeight, served
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["CompressedTensors"]

_PACKED = {"pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"}
_PLAIN = {"float-quantized", "int-quantized", "naive-quantized"}
_CONSTANTS = ("weight_shape", "input_scale", "input_zero_point", "input_global_scale", "output_scale",
              "output_zero_point", "k_scale", "v_scale", "q_scale")  # fmt: skip


@dataclass(frozen=True)
class _Group:
    """One entry of ``config_groups``: modules, the library's arguments, and the library's compressor."""

    targets: tuple[str, ...]
    format: str
    args: Any
    scheme: Any

    def matches(self, module: str) -> bool:
        """By name; a target that is a class (Linear) may be any module."""
        return any(
            re.match(target[3:], module) if target.startswith("re:") else target[:1].isupper() or target == module
            for target in self.targets
        )


class CompressedTensors:
    """Made for one base.

    Args:
        config: ``quantization_config`` of the base's config.json.
        dtype: of the weights before quantisation, a safetensors spelling of 16 bits.

    Raises ConfigError for a format that is not known, or when compressed-tensors is not installed.
    """

    def __init__(self, config: Mapping[str, Any], dtype: str) -> None:
        self._dtype = dtype
        self._groups = tuple(_groups(config))
        self.scheme = "+".join(dict.fromkeys(_name_of(group) for group in self._groups))

    def weights(self, table: Mapping[str, TensorSpec]) -> Sequence[QuantizedWeight]:
        """Every module with codes. Raises TensorError when scales are missing or do not fit."""
        found: list[QuantizedWeight] = []
        for spec in table.values():
            module, _, leaf = spec.name.rpartition(".")
            codes = leaf == "weight_packed" or (leaf == "weight" and spec.dtype in ("F8_E4M3", "I8"))
            if codes:
                found.append(self._weight(table, module, spec))
            elif leaf == "weight_scale" and not {f"{module}.weight", f"{module}.weight_packed"} & table.keys():
                raise TensorError("scales without a weight", field=spec.name, expected=f"{module}.weight_packed",
                                  do="quantise the base again")  # fmt: skip
        return found

    def _weight(self, table: Mapping[str, TensorSpec], module: str, codes: TensorSpec) -> QuantizedWeight:
        group = next((group for group in self._groups if group.matches(module)), None)
        if group is None:
            raise ConfigError("no group of the base's configuration matches a quantised module", field="config_groups",
                              found=module, expected=[t for g in self._groups for t in g.targets])  # fmt: skip
        args = group.args
        per_code = {"pack-quantized": 32 // args.num_bits}.get(group.format, 2 if group.format in _PACKED else 1)
        if len(codes.shape) < 2:
            raise TensorError("codes are no matrix", field=codes.name, found=list(codes.shape))
        rows, cols = codes.shape[-2], codes.shape[-1] * per_code
        block = _block(args, rows, cols, codes.name)
        outputs = [
            Output("weight_packed" if group.format in _PACKED else "weight", codes, (1, per_code), codes=True),
            Output("weight_scale", served(table, f"{module}.weight_scale", codes.name), block),
        ]
        levels = [block]
        if args.strategy == "tensor_group":
            whole = (rows, cols)
            outputs.append(
                Output("weight_global_scale", served(table, f"{module}.weight_global_scale", codes.name), whole)
            )
            levels.insert(0, whole)
        if not args.symmetric:
            points = served(table, f"{module}.weight_zero_point", codes.name)
            packed = group.format == "pack-quantized" and args.strategy in ("group", "channel")
            cell = (block[0] * per_code, block[1]) if packed else block
            outputs.append(Output("weight_zero_point", points, cell, codes=packed))
        source = TensorSpec(f"{module}.weight", self._dtype, (*codes.shape[:-1], cols))
        return QuantizedWeight(source, tuple(outputs), tuple(levels), group)

    def constants(self, table: Mapping[str, TensorSpec]) -> Collection[str]:
        """Shapes, and scales of activations and of the KV cache."""
        return [name for name in table if name.rpartition(".")[2] in _CONSTANTS]

    def project(
        self, weight: QuantizedWeight, values: torch.Tensor, extrema: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Mapping[str, torch.Tensor]:
        """What the library's compressor makes of ``values`` under scales from ``extrema``."""
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        group: _Group = weight.how
        args = group.args
        state: dict[str, torch.Tensor] = {"weight": values}
        whole = None
        if args.strategy == "tensor_group":
            whole = generate_gparam(extrema[0][0].reshape(1), extrema[0][1].reshape(1))
            state["weight_global_scale"] = whole
        scale, points = calculate_qparams(*extrema[-1], args, global_scale=whole)
        shape = scale.shape
        flat = args.strategy == "tensor"
        state["weight_scale"] = scale.reshape(1) if flat else scale
        state["weight_zero_point"] = points.reshape(1) if flat else points
        compressor = BaseCompressor.get_value_from_registry(group.format)
        found = compressor.compress(state, group.scheme)
        out = {output.role: found[output.role] for output in weight.outputs}
        for output in weight.outputs:
            if not output.codes:
                grid = (1, 1) if output.role == "weight_global_scale" else shape
                out[output.role] = out[output.role].reshape(grid).to(output.spec.type.torch)
        return out


def _groups(config: Mapping[str, Any]) -> Iterator[_Group]:
    try:
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    except ImportError as error:
        raise ConfigError("this view needs the library of its format", field="compressed-tensors", found=str(error),
                          do="pip install 'weight-sync[quantize]'") from error  # fmt: skip
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError("the base does not say how it is quantised", field="config_groups", found=groups,
                          expected="one group or more")  # fmt: skip
    for name, entry in groups.items():
        form = entry.get("format") or config.get("format")
        if form not in _PACKED | _PLAIN or not entry.get("weights"):
            raise ConfigError("a format that is not known here", field=f"config_groups.{name}.format", found=form,
                              expected=", ".join(sorted(_PACKED | _PLAIN)),
                              do="set scheme: cast to publish tensors that are quantised already")  # fmt: skip
        try:
            args = QuantizationArgs.model_validate(entry["weights"])
        except ValueError as error:
            raise ConfigError("arguments that the library refuses", field=f"config_groups.{name}.weights",
                              found=str(error)) from error  # fmt: skip
        if args.actorder is not None or args.num_bits not in (4, 8):
            raise ConfigError("arguments that are not known here", field=f"config_groups.{name}.weights",
                              found=f"num_bits {args.num_bits}, actorder {args.actorder}",
                              expected="4 or 8 bits, no order of activations")  # fmt: skip
        targets = tuple(entry.get("targets") or ("Linear",))
        yield _Group(targets, form, args, QuantizationScheme(targets=list(targets), weights=args))


def _name_of(group: _Group) -> str:
    """int4-group128, nvfp4, fp8-channel, ..."""
    short = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}.get(group.format)
    if short is not None:
        return short
    args = group.args
    kind = "fp" if str(getattr(args.type, "value", args.type)) == "float" else "int"
    strategy = str(getattr(args.strategy, "value", args.strategy))
    size = {"group": str(args.group_size), "block": "x".join(map(str, args.block_structure or ()))}.get(strategy, "")
    return f"{kind}{args.num_bits}-{strategy}{size and '-'}{size}"


def _block(args: Any, rows: int, cols: int, name: str) -> tuple[int, int]:
    """Rows and columns that share a scale. Raises TensorError when groups do not divide the columns."""
    if args.strategy == "tensor":
        return rows, cols
    if args.strategy == "channel":
        return 1, cols
    if args.strategy == "block":
        return int(args.block_structure[0]), int(args.block_structure[1])
    if args.strategy not in ("group", "tensor_group"):
        raise ConfigError("a strategy that is not known here", field="strategy", found=args.strategy,
                          expected="tensor, channel, group, tensor_group, block")  # fmt: skip
    if cols % args.group_size:
        raise TensorError("groups do not divide the columns", field=name, found=f"{cols} columns",
                          expected=f"a multiple of group_size {args.group_size}",
                          do="leave this module out of the base's quantisation")  # fmt: skip
    return 1, int(args.group_size)
