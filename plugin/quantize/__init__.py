"""Quantisers: which one a view needs, from its base's own config.json, and the schemes that come with weight_sync.

Owns the choice. Owns no arithmetic (one file per scheme) and no shards (projection.py). Third parties register a class
in the entry-point group ``weight_sync.quantizers`` under the ``quant_method`` that it serves; see ``weight_sync.ports``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.config import View
from weight_sync.errors import ConfigError
from weight_sync.ports import Quantizer
from weight_sync.registry import find, names

if TYPE_CHECKING:
    from weight_sync.projection import Plan

__all__ = ["quantizer_of", "scheme_of"]

_CASTS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_OURS = {
    "fp8": "weight_sync.quantize.fp8:BlockFp8",
    "compressed-tensors": "weight_sync.quantize.compressed:CompressedTensors",
}
_DTYPES = {"bfloat16": "BF16", "float16": "F16"}


def scheme_of(view: View) -> tuple[str, str, Plan | None]:
    """(scheme, dtype of all floats or "", plan of a quantised view or None) of a view.

    Raises ConfigError for a scheme that is not known or needs a base, TensorError for a base that does not fit it.
    """
    if view.scheme in _CASTS:
        _check_cast(view)
        return f"cast-{view.scheme}", _CASTS[view.scheme], None
    config = {} if view.base is None or view.scheme == "cast" else base_config(view.base)
    method = view.scheme if view.scheme not in (None, "cast") else _method(config)
    if method is None:
        return "cast", "", None
    _check_known(method)
    if view.base is None:
        raise ConfigError("a quantised view needs its base", field="weight_sync.views.base", found=None,
                          expected="a checkpoint that is quantised in this way",
                          do="quantise the trainer's checkpoint with the format's own tools and name it")  # fmt: skip
    from weight_sync.checkpoint import Checkpoint
    from weight_sync.projection import Plan

    quantizer = quantizer_of(method, config.get("quantization_config") or {}, dtype_of_base(config))
    plan = Plan.of(quantizer, Checkpoint(view.base))
    if not plan.weights:
        raise ConfigError("the base holds no quantised weight", field="weight_sync.views.base", found=view.base,
                          expected=f"tensors of scheme {method}", do="quantise the base, or set scheme: cast")  # fmt: skip
    return quantizer.scheme, "", plan


def _check_cast(view: View) -> None:
    """A base whose floats are of another dtype is no base of this view."""
    if view.base is None:
        return
    from weight_sync.checkpoint import Checkpoint

    found = {spec.dtype for spec in Checkpoint(view.base).table if spec.dtype in ("BF16", "F16", "F32")}
    if found and _CASTS[str(view.scheme)] not in found:
        raise ConfigError("the base is of another dtype", field="weight_sync.views.scheme", found=sorted(found),
                          expected=view.scheme, do="name a base of that dtype, or none")  # fmt: skip


def quantizer_of(method: str, config: Mapping[str, Any], dtype: str) -> Quantizer:
    """The quantiser of a ``quant_method``. Raises ConfigError when there is none, or its library is not installed."""
    _check_known(method)
    if method not in _OURS:
        made: Quantizer = find("quantizers", method)(config, dtype)
        return made
    module, _, name = _OURS[method].partition(":")
    ours: Quantizer = getattr(importlib.import_module(module), name)(config, dtype)
    return ours


def _check_known(method: str) -> None:
    if method in _OURS or method in names("quantizers"):
        return
    known = sorted({*_CASTS, "cast", *_OURS, *names("quantizers")})
    raise ConfigError("no quantiser for this scheme", field="quant_method", found=method, expected=", ".join(known),
                      do="register one (entry points weight_sync.quantizers), or set scheme: cast to publish tensors "
                         "that are quantised already")  # fmt: skip


def base_config(base: str) -> Mapping[str, Any]:
    """config.json of a checkpoint folder; empty without one. Raises ConfigError when it is none."""
    path = Path(base) / "config.json"
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError("cannot read the base's configuration", field=str(path), found=str(error)) from error
    if not isinstance(data, dict):
        raise ConfigError(
            "not a model's configuration", field=str(path), found=type(data).__name__, expected="a mapping"
        )
    text = data.get("text_config")
    if "quantization_config" not in data and isinstance(text, dict) and "quantization_config" in text:
        return {**data, "quantization_config": text["quantization_config"]}
    return data


def _method(config: Mapping[str, Any]) -> str | None:
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if not isinstance(method, str):
        raise ConfigError("the base does not say how it is quantised", field="quantization_config.quant_method",
                          found=method, expected="a name", do="set scheme")  # fmt: skip
    return method


def dtype_of_base(config: Mapping[str, Any]) -> str:
    """The 16-bit dtype of the weights before they are quantised; bf16 where the base does not say."""
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    named = next((c[k] for c in (config, inner) for k in ("dtype", "torch_dtype") if isinstance(c.get(k), str)), "")
    return _DTYPES.get(named.removeprefix("torch."), "BF16")
