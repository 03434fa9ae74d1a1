"""Where a converter's outputs come from, found by running it once on meta tensors.

Owns the dispatch mode that records provenance. Owns no value (nothing is computed, moved or sent), no probing with
values (layout/probe.py) and no host.

Views need nothing: a meta tensor's storage, offset and strides say where it points. Operations that copy are recorded
as links from the new storage to the sources; what is filled with a constant comes from nowhere. An all-gather is
recorded as if only this rank's part arrived. Anything else that makes data from tracked data taints its result, and
reading a tainted tensor raises UntraceableError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weight_sync.dtypes import dtype_of_torch
from weight_sync.errors import LayoutError, UntraceableError, WeightSyncError
from weight_sync.layout.box import Box
from weight_sync.layout.link import Link, normal, row_major
from weight_sync.layout.meet import meet, minus
from weight_sync.layout.placement import Layout, Placement, StorageSpec, merge
from weight_sync.tensors import TensorSpec

__all__ = ["Converter", "Piece", "Refusal", "Tracer", "spec_of", "trace_converter"]

Converter = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""In-memory tensors by name -> checkpoint tensors by name. Its order, and whether it is called again, do not matter."""

_aten = torch.ops.aten
_COPIES = {
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.alias_copy.default,
    _aten.view_copy.default,
    _aten._reshape_copy.default,
    _aten.lift_fresh_copy.default,
    _aten.detach_copy.default,
}
_FACTORIES = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.zeros.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.new_zeros.default,
}
_FILLS = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
_DEVICE_ARGUMENTS = ("device", "non_blocking", "pin_memory")


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``at`` (of a storage or a tensor) come from ``place`` of a source, cast on the way."""

    at: Box
    source: str
    place: Box
    casts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an output could not be traced: the operation, and the sources that it depends on."""

    operation: str
    sources: frozenset[str]


@dataclass(slots=True)
class _Filled:
    """A storage that was made while tracing; elements without a piece come from nowhere."""

    pieces: list[Piece] = field(default_factory=list)
    last: int = -1  # the largest element written so far


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The spec under which safetensors would save a tensor. Raises TensorError on a dtype that it lacks."""
    row, shape = dtype_of_torch(tensor.dtype), tuple(tensor.shape)
    if row.bits < 8 and shape:
        shape = (*shape[:-1], shape[-1] * 8 // row.bits)
    return TensorSpec(name, row.name, shape)


def trace_converter(
    convert: Converter,
    sources: Mapping[str, torch.Tensor],
    *,
    group_rank: Callable[[Any], int] | None = None,
) -> tuple[Layout, dict[str, Refusal]]:
    """Runs ``convert`` on meta twins of ``sources`` and reads off where its outputs come from.

    ``sources`` give shapes and dtypes only. ``group_rank`` tells this process's rank in a process group (as the c10d
    operator gets it); needed only by converters that gather.

    Returns the layout (storages: the sources as contiguous tensors; tensors: all outputs) and, by name, the outputs
    that could not be traced, which have no placements. Raises UntraceableError when the converter fails on meta
    tensors altogether.
    """
    tracer = Tracer(group_rank)
    inputs = {name: tracer.source(name, tensor.shape, tensor.dtype) for name, tensor in sources.items()}
    try:
        with tracer:
            outputs = convert(inputs)
    except WeightSyncError:
        raise
    except Exception as error:  # whatever a host raises when a meta tensor has no data to give
        raise UntraceableError(
            "the converter does not run on meta tensors", field=type(error).__name__, found=str(error)
        ) from error
    tensors, placements, refused = [], [], {}
    for name, tensor in outputs.items():
        spec = spec_of(name, tensor)
        tensors.append(spec)
        refusal = tracer.refusal(tensor)
        if refusal is not None:
            refused[name] = refusal
            continue
        for piece in tracer.read(tensor, row_major(tensor.shape)):
            placements.append(Placement(name, piece.at, piece.source, piece.place, piece.casts))
    storages = {
        name: StorageSpec(tensor.numel(), dtype_of_torch(tensor.dtype).name) for name, tensor in sources.items()
    }
    return merge(tensors, placements, storages), refused


class Tracer(TorchDispatchMode):
    """Records what is copied where while it is active (``with tracer:``).

    Allocations and moves between devices are redirected to meta: a converter that gathers a model on the CPU costs no
    memory here.
    """

    def __init__(self, group_rank: Callable[[Any], int] | None = None) -> None:
        super().__init__()
        self._group_rank = group_rank
        self._sources: dict[int, str] = {}
        self._filled: dict[int, _Filled] = {}
        self._tainted: dict[int, Refusal] = {}
        self._alive: list[torch.Tensor] = []  # a storage's address tells it apart only while it lives

    # --- what callers use ---

    def source(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous meta tensor to feed in; pieces refer to its flat elements by ``name``."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._sources[self._key(tensor)] = name
        return tensor

    def read(self, tensor: torch.Tensor, onto: Box) -> list[Piece]:
        """Where the elements of ``tensor`` come from; element k of the tensor is element k of ``onto``.

        ``onto`` has the sizes of the tensor. Elements that come from nowhere are in no piece. Raises UntraceableError
        on a tainted tensor.
        """
        if not tensor.numel():
            return []
        refusal = self.refusal(tensor)
        if refusal is not None:
            raise UntraceableError(
                "data is made, not moved",
                field=refusal.operation,
                found=", ".join(sorted(refusal.sources)),
                do="probe the converter with values",
            )
        key = tensor.untyped_storage()._cdata
        view = _view(tensor)
        if (name := self._sources.get(key)) is not None:
            at, place = normal((onto, view))
            return [Piece(at, name, place)]
        if (filled := self._filled.get(key)) is None:
            return []
        out = []
        for i, _, (_, place, at) in meet([(p.at, p.place) for p in filled.pieces], [normal((view, onto))]):
            at, place = normal((at, place))
            out.append(Piece(at, filled.pieces[i].source, place, filled.pieces[i].casts))
        return out

    def refusal(self, tensor: torch.Tensor) -> Refusal | None:
        """Why ``tensor`` cannot be read; None when it can."""
        return self._tainted.get(tensor.untyped_storage()._cdata)

    # --- recording ---

    def _key(self, tensor: torch.Tensor) -> int:
        self._alive.append(tensor)
        return cast(int, tensor.untyped_storage()._cdata)

    def _knows(self, tensor: torch.Tensor) -> bool:
        key = tensor.untyped_storage()._cdata
        return key in self._sources or key in self._filled or key in self._tainted

    def _origins(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        names: set[str] = set()
        for key in {tensor.untyped_storage()._cdata for tensor in tensors}:
            if key in self._tainted:
                names |= self._tainted[key].sources
            elif key in self._sources:
                names.add(self._sources[key])
            elif key in self._filled:
                names |= {piece.source for piece in self._filled[key].pieces}
        return frozenset(names)

    def _taint(self, operation: str, results: Iterable[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        origins = self._origins(inputs)
        for tensor in results:
            key = self._key(tensor)
            if key in self._sources:
                raise UntraceableError(
                    "the converter changes or reinterprets its input", field=operation, found=self._sources[key]
                )
            self._tainted[key] = Refusal(operation, origins)

    def _record(self, target: torch.Tensor, origin: torch.Tensor, operation: str, *, fresh: bool = True) -> None:
        """``target`` (part of a storage) now holds what ``origin``, of the same shape, holds.

        ``fresh``: nothing was written to that part before.
        """
        key = self._key(target)
        if key in self._sources or self.refusal(origin) is not None or key in self._tainted:
            self._taint(operation, [target], [target, origin])
            return
        box = _view(target)
        filled = self._filled.setdefault(key, _Filled())
        if not box.count:
            return
        if not fresh and box.offset <= filled.last:
            filled.pieces = _overwritten(filled.pieces, *normal((box,)))
        filled.last = max(filled.last, box.last)
        cast_to = () if target.dtype == origin.dtype else (dtype_of_torch(target.dtype).name,)
        filled.pieces += [
            Piece(piece.at, piece.source, piece.place, piece.casts + cast_to) for piece in self.read(origin, box)
        ]

    def _erase(self, target: torch.Tensor, operation: str) -> None:
        """``target`` (part of a storage) now holds a constant: padding, or a default that is loaded over."""
        filled = self._filled.get(self._key(target))
        if filled is None:
            self._taint(operation, [target], [target])
        else:
            filled.pieces = _overwritten(filled.pieces, *normal((_view(target),)))

    # --- interception ---

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        inputs = list(_tensors((*args, *kwargs.values())))
        known = [tensor for tensor in inputs if self._knows(tensor)]
        if func.namespace == "c10d" and known:
            return self._gather(func, args, inputs)
        if func in _FACTORIES:
            return func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": False})
        if func is _aten._to_copy.default and known:
            kwargs = {name: value for name, value in kwargs.items() if name not in _DEVICE_ARGUMENTS}
        result = func(*args, **kwargs)
        if known:
            self._note(func, args, inputs, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], inputs: list[torch.Tensor], result: Any) -> None:
        results = list(_tensors((result,)))
        name = str(func)
        if func is _aten.copy_.default:
            self._record(args[0], args[1].expand(args[0].shape), name, fresh=False)
        elif func is _aten._foreach_copy_.default:
            for target, origin in zip(args[0], args[1], strict=True):
                self._record(target, origin.expand(target.shape), name, fresh=False)
        elif func in _FILLS:
            self._erase(args[0], name)
        elif func in _COPIES:
            self._record(result.view(args[0].shape) if result.shape != args[0].shape else result, args[0], name)
        elif func is _aten.cat.default:
            self._note_cat(args, result, name)
        elif func is _aten.stack.default:
            for index, origin in enumerate(args[0]):
                self._record(result.select(args[1] if len(args) > 1 else 0, index), origin, name)
        elif not self._is_view(func, inputs, results):
            if not results and not func._schema.is_mutable:
                raise UntraceableError("the converter looks at values", field=name)
            self._taint(name, results or inputs, inputs)

    def _note_cat(self, args: tuple[Any, ...], result: torch.Tensor, name: str) -> None:
        dim, at = args[1] if len(args) > 1 else 0, 0
        for origin in args[0]:
            if origin.numel():
                self._record(result.narrow(dim, at, origin.shape[dim]), origin, name)
                at += origin.shape[dim]

    @staticmethod
    def _is_view(func: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
        known = {(tensor.untyped_storage()._cdata, tensor.dtype) for tensor in inputs}
        return (
            bool(results)
            and not func._schema.is_mutable
            and all((tensor.untyped_storage()._cdata, tensor.dtype) in known for tensor in results)
        )

    def _gather(self, func: Any, args: tuple[Any, ...], inputs: list[torch.Tensor]) -> Any:
        """An all-gather, without sending: our own slot receives our part, the others stay unknown."""
        name = func._schema.name
        if name not in ("c10d::allgather_", "c10d::_allgather_base_"):
            raise UntraceableError("collective cannot be traced", field=name, found=sorted(self._origins(inputs)))
        if self._group_rank is None:
            raise LayoutError("converter gathers", field="group_rank", found=None, expected="a function of the group")
        rank = self._group_rank(args[2])
        if name == "c10d::allgather_":
            for slots, part in zip(args[0], args[1], strict=True):
                self._record(slots[rank], part, name, fresh=False)
        else:
            flat, part = args[0].view(-1), args[1]
            size = part.numel()
            self._record(flat[rank * size : (rank + 1) * size], part.reshape(-1), name, fresh=False)
        from torch._C._distributed_c10d import FakeWork, Work

        return args[0], Work.boxed(FakeWork())


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments or results, which nest in lists and tuples only."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _view(tensor: torch.Tensor) -> Box:
    """The elements of a tensor in its storage."""
    return Box(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def _overwritten(pieces: Iterable[Piece], hole: Box) -> list[Piece]:
    out = []
    for piece in pieces:
        link: Link = (piece.at, piece.place)
        for at, place in minus([link], hole):
            out.append(Piece(at, piece.source, place, piece.casts))
    return out
