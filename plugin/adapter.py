"""LoRA adapters as versions: PEFT's names and configuration, which base an adapter is for, and whether the two fit.

Owns the reading of ``adapter_config.json``, the pairs of factors in a table of tensors, the checks, and how a base is
spelt in errors. Owns no bits, no arithmetic (adapters/engines/lora.py merges) and no publishing (adapting.py).

A version is an adapter when its manifest has the field ``adapter``. To everything else it is a small model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weight_sync.codec.digest import Digest
from weight_sync.errors import EngineError, TensorError, WrongBaseError
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.tensors import TensorSpec

__all__ = [
    "ADAPTER_CONFIG", "ADAPTER_WEIGHTS", "AdapterConfig", "Pair", "adapter_of", "base_facts", "base_of_facts", "base_text",
    "check_base", "check_fit",
    "check_rank", "named_base",
    "pairs_of",
]  # fmt: skip

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTORS = {
    "lora_A.weight": ("lora_B.weight", False),
    "lora_embedding_A": ("lora_embedding_B", True),
}
_UPS = tuple(f".{up}" for up, _ in _FACTORS.values())
_NAMED = 5  # names that a message lists


@dataclass(frozen=True)
class AdapterConfig:
    """What of ``adapter_config.json`` decides how an adapter is computed.

    Attributes:
        text: the file, as PEFT wrote it.
        rank, alpha: where no pattern says otherwise.
        targets: names of modules, or one regular expression.
    """

    text: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rslora: bool
    transposed: bool
    beyond: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> AdapterConfig:
        """Raises TensorError that names the key."""
        try:
            found = json.loads(text)
        except ValueError as error:
            raise TensorError("not JSON", field=ADAPTER_CONFIG, found=str(error), do="save it with PEFT") from error
        if not isinstance(found, dict) or found.get("peft_type") != "LORA":
            kind = found.get("peft_type") if isinstance(found, dict) else type(found).__name__
            raise TensorError("not a LoRA adapter", field=f"{ADAPTER_CONFIG}: peft_type", found=kind, expected="LORA",
                              do="merge other kinds of adapters and publish the whole model")  # fmt: skip
        rank, alpha = found.get("r"), found.get("lora_alpha")
        for key, value in (("r", rank), ("lora_alpha", alpha)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 30:
                raise TensorError("not a number above 0", field=f"{ADAPTER_CONFIG}: {key}", found=value)
        assert rank is not None and alpha is not None
        targets = found.get("target_modules") or ()
        return cls(
            text, int(rank), float(alpha), (targets,) if isinstance(targets, str) else tuple(map(str, targets)),
            _pattern(found, "rank_pattern"), _pattern(found, "alpha_pattern"), bool(found.get("use_rslora")),
            bool(found.get("fan_in_fan_out")), tuple(_beyond(found)),
        )  # fmt: skip

    def adapts(self, module: str) -> bool:
        """Whether PEFT would adapt a module: by a name that its path ends with, or by the one expression."""
        if not self.targets or self.targets == ("all-linear",):
            return True
        try:
            return any(
                module == target or module.endswith(f".{target}") or re.fullmatch(target, module) is not None
                for target in self.targets
            )
        except re.error as error:
            raise TensorError("not a pattern of names", field=f"{ADAPTER_CONFIG}: target_modules",
                              found=self.targets) from error  # fmt: skip

    def rank_of(self, module: str) -> int:
        """Of the adapter to one module, by its path in the model."""
        return int(_matched(self.ranks, module, self.rank))

    def scaling(self, module: str) -> float:
        """By which B @ A is multiplied before it is added to the module's weight, as PEFT computes it."""
        rank, alpha = self.rank_of(module), _matched(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    @property
    def largest_rank(self) -> int:
        """Of all modules."""
        return max((self.rank, *map(int, self.ranks.values())))


def _pattern(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = found.get(key) or {}
    fits = isinstance(value, dict) and all(isinstance(v, int | float) and 0 < v < 1 << 30 for v in value.values())
    if not fits:
        raise TensorError("not a mapping of names to numbers", field=f"{ADAPTER_CONFIG}: {key}", found=value)
    return dict(value)


def _matched(patterns: Mapping[str, Any], module: str, default: float) -> float:
    """PEFT's own rule: the first pattern that is a suffix of the path, from a dot on."""
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(value)
        except re.error as error:
            raise TensorError("not a pattern of names", field=ADAPTER_CONFIG, found=pattern) from error
    return default


def _beyond(found: Mapping[str, Any]) -> Iterator[str]:
    """What is more than the sum of a weight and two factors."""
    for key in ("use_dora", "lora_bias", "modules_to_save", "use_qalora", "use_bdlora", "alora_invocation_tokens",
                "layer_replication", "trainable_token_indices", "target_parameters"):  # fmt: skip
        if found.get(key):
            yield key
    if found.get("bias", "none") != "none":
        yield "bias"
    # these change the base's weights when PEFT loads the adapter; LoftQ, too
    if str(found.get("init_lora_weights", True)).lower().startswith(("pissa", "olora", "corda", "loftq")):
        yield "init_lora_weights"


@dataclass(frozen=True)
class Pair:
    """The two factors of one adapted weight.

    Attributes:
        module: path of the module in the base model.
        down: A, (rank, inputs).
        up: B, (outputs, rank).
        embedding: the weight is a table of embeddings, whose inputs are rows.
    """

    module: str
    down: TensorSpec
    up: TensorSpec
    embedding: bool

    @property
    def weight(self) -> str:
        """Name of what is adapted."""
        return f"{self.module}.weight"

    @property
    def rank(self) -> int:
        """Of both."""
        return self.down.shape[0]

    def shape(self, config: AdapterConfig) -> tuple[int, ...]:
        """That the adapted weight must have."""
        outer = (self.up.shape[0], self.down.shape[1])
        return outer[::-1] if self.embedding or config.transposed else outer


def pairs_of(table: Sequence[TensorSpec]) -> tuple[tuple[Pair, ...], tuple[str, ...]]:
    """The pairs in an adapter's tensors, and the names that belong to none.

    Raises TensorError for a factor without its other half, and for two that cannot be multiplied.
    """
    specs = {spec.name: spec for spec in table}
    pairs: list[Pair] = []
    for name, down in specs.items():
        ending = next((ending for ending in _FACTORS if name.endswith(f".{ending}")), None)
        if ending is None or not name.startswith(_PREFIX):
            continue
        other, embedding = _FACTORS[ending]
        up = specs.get(name.removesuffix(ending) + other)
        if up is None:
            raise TensorError("a factor without its other half", field=name, expected=other, do="save it with PEFT")
        if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1]:
            raise TensorError("not the factors of a matrix", field=name, found=[list(down.shape), list(up.shape)],
                              expected="(rank, inputs) and (outputs, rank)", do="adapt linear layers")  # fmt: skip
        pairs.append(Pair(name.removeprefix(_PREFIX).removesuffix(f".{ending}"), down, up, embedding))
    used = {part.name for pair in pairs for part in (pair.down, pair.up)}
    alone = [name for name in specs if name not in used and name.endswith(_UPS)]
    if alone:
        raise TensorError("a factor without its other half", field=alone[0], expected="lora_A", do="save it with PEFT")
    return tuple(pairs), tuple(name for name in specs if name not in used)


def check_fit(config: AdapterConfig, table: Sequence[TensorSpec], base: Sequence[TensorSpec]) -> tuple[Pair, ...]:
    """The pairs of an adapter whose tensors belong to a base with this table.

    Raises TensorError that names the tensor, what it would adapt and what the base has there.
    """
    pairs, rest = pairs_of(table)
    if not pairs:
        raise TensorError("no adapter's tensors", field="names", found=sorted(rest)[:_NAMED],
                          expected=f"{_PREFIX}<module>.lora_A.weight", do="offer what PEFT saves")  # fmt: skip
    weights = {spec.name: spec for spec in base}
    lost = sorted(pair.weight for pair in pairs if pair.weight not in weights and not _tied(pair, weights))
    if lost:
        raise TensorError("the adapter is not for this base, which lacks what it adapts", field=lost[0],
                          found=f"{len(lost)} of {len(pairs)} adapted weights are not in the base",
                          do="name the base that it was trained on")  # fmt: skip
    odd = [name for name in rest if not config.beyond and not _is_of_base(name, weights)]
    if odd:
        raise TensorError("a tensor that adapts nothing", field=odd[0], found=f"{len(odd)} such tensors",
                          expected="lora_A and lora_B of modules", do="offer what PEFT saves")  # fmt: skip
    for pair in pairs:
        if not config.adapts(pair.module):
            raise TensorError("the configuration does not adapt this module", field=pair.down.name,
                              found=list(config.targets), expected=pair.module,
                              do="save tensors and configuration together")  # fmt: skip
        if pair.rank != config.rank_of(pair.module):
            raise TensorError("rank differs from the configuration's", field=pair.down.name, found=pair.rank,
                              expected=config.rank_of(pair.module), do="save tensors and configuration together")  # fmt: skip
        weight = weights.get(pair.weight)
        if weight is not None and weight.shape != pair.shape(config):
            raise TensorError("the adapter does not fit the base's weight", field=pair.weight,
                              found=list(pair.shape(config)), expected=list(weight.shape),
                              do="name the base that it was trained on")  # fmt: skip
    return pairs


def _is_of_base(name: str, weights: Mapping[str, TensorSpec]) -> bool:
    """A copy of a weight of the base, which PEFT saves of embeddings that are adapted or were made larger."""
    return name.removeprefix(_PREFIX).replace(".base_layer.", ".") in weights


def _tied(pair: Pair, weights: Mapping[str, TensorSpec]) -> bool:
    """The head of a model whose checkpoint holds it as the embeddings."""
    return pair.module == "lm_head" and any(name.endswith("embed_tokens.weight") for name in weights)


def adapter_of(manifest: manifest_pb2.VersionManifest) -> manifest_pb2.Adapter:
    """What makes a version an adapter. Raises EngineError for a whole model."""
    if not manifest.HasField("adapter"):
        raise EngineError("the version is a whole model, not an adapter", field="adapter",
                          found=f"version {manifest.number} of run {manifest.run_id}", expected="a run of adapters",
                          do="follow it with an engine for models")  # fmt: skip
    return manifest.adapter


def base_text(base: common_pb2.VersionId | None, digest: Digest | None, where: str = "") -> str:
    """A base as errors name it."""
    what = where or "a checkpoint" if base is None else f"version {base.number} of run {base.run_id}"
    return f"{what}, digest {'unknown' if digest is None else digest.hex()}"


def named_base(adapter: manifest_pb2.Adapter) -> str:
    """The base that an adapter names, for errors."""
    base = adapter.base if adapter.HasField("base") else None
    return base_text(base, Digest.from_proto(adapter.base_digest), adapter.reference.uri)


def base_facts(adapter: manifest_pb2.Adapter) -> dict[str, Any]:
    """The base as JSON has it; ``run_id`` and ``version`` are null for a checkpoint that no run published."""
    named = adapter.HasField("base")
    return {
        "run_id": adapter.base.run_id if named else None,
        "version": adapter.base.number if named else None,
        "view": adapter.base_view,
        "digest": Digest.from_proto(adapter.base_digest).hex(),
        "uri": adapter.reference.uri,
    }


def base_of_facts(facts: Mapping[str, Any]) -> manifest_pb2.Adapter:
    """From `base_facts`. Raises ValueError, LookupError or TypeError for what is none."""
    found = manifest_pb2.Adapter(base_view=str(facts["view"]), base_digest=Digest.parse(facts["digest"]).to_proto())
    found.reference.uri = str(facts["uri"])
    if facts["run_id"] is not None:
        found.base.CopyFrom(common_pb2.VersionId(run_id=str(facts["run_id"]), number=int(facts["version"])))
    return found


def check_base(adapter: manifest_pb2.Adapter, held: common_pb2.VersionId | None, digest: Digest | None) -> None:
    """Raises WrongBaseError, naming both bases, unless what an engine holds is the base that the adapter names."""
    if digest is not None and digest == Digest.from_proto(adapter.base_digest):
        return
    raise WrongBaseError(
        "the adapter is for another base than the engine holds; it is not served", field="base",
        found=base_text(held, digest), expected=named_base(adapter),
        do="bring the engine to that base, or train and publish an adapter for the one that it holds (fork: true)",
    )  # fmt: skip


def check_rank(config: AdapterConfig, most: int | None, option: str) -> None:
    """Raises EngineError when an engine has no room for the rank; ``most`` None: it did not say."""
    if most is not None and config.largest_rank > most:
        raise EngineError("the adapter's rank is above the engine's maximum", field="r", found=config.largest_rank,
                          expected=f"at most {most}", do=f"start the engine with {option} {config.largest_rank}")  # fmt: skip
