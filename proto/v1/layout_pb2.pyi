from weight_sync.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Storage(_message.Message):
    __slots__ = ("key", "elements", "dtype")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    key: str
    elements: int
    dtype: str
    def __init__(self, key: _Optional[str] = ..., elements: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class PlacementEntry(_message.Message):
    __slots__ = ("tensor", "storage", "offset", "sizes", "strides", "place_offset", "place_strides", "casts")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    PLACE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    PLACE_STRIDES_FIELD_NUMBER: _ClassVar[int]
    CASTS_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    storage: int
    offset: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    place_offset: int
    place_strides: _containers.RepeatedScalarFieldContainer[int]
    casts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tensor: _Optional[int] = ..., storage: _Optional[int] = ..., offset: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., place_offset: _Optional[int] = ..., place_strides: _Optional[_Iterable[int]] = ..., casts: _Optional[_Iterable[str]] = ...) -> None: ...

class RankLayout(_message.Message):
    __slots__ = ("rank", "tensors", "storages", "placements")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    STORAGES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    tensors: _containers.RepeatedCompositeFieldContainer[_common_pb2.TensorSpec]
    storages: _containers.RepeatedCompositeFieldContainer[Storage]
    placements: _containers.RepeatedCompositeFieldContainer[PlacementEntry]
    def __init__(self, rank: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[_common_pb2.TensorSpec, _Mapping]]] = ..., storages: _Optional[_Iterable[_Union[Storage, _Mapping]]] = ..., placements: _Optional[_Iterable[_Union[PlacementEntry, _Mapping]]] = ...) -> None: ...

class LayoutFile(_message.Message):
    __slots__ = ("format", "trainers", "engines", "note")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    format: int
    trainers: _containers.RepeatedCompositeFieldContainer[RankLayout]
    engines: _containers.RepeatedCompositeFieldContainer[RankLayout]
    note: str
    def __init__(self, format: _Optional[int] = ..., trainers: _Optional[_Iterable[_Union[RankLayout, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[RankLayout, _Mapping]]] = ..., note: _Optional[str] = ...) -> None: ...
