from weight_sync.proto.v1 import common_pb2 as _common_pb2
from weight_sync.proto.v1 import manifest_pb2 as _manifest_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorReport(_message.Message):
    __slots__ = ("tensor", "changed", "digest", "whole")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    changed: int
    digest: _common_pb2.Digest
    whole: bool
    def __init__(self, tensor: _Optional[int] = ..., changed: _Optional[int] = ..., digest: _Optional[_Union[_common_pb2.Digest, _Mapping]] = ..., whole: bool = ...) -> None: ...

class RankReport(_message.Message):
    __slots__ = ("tensors", "shards")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorReport]
    shards: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.ShardRef]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorReport, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[_manifest_pb2.ShardRef, _Mapping]]] = ...) -> None: ...

class RoundReport(_message.Message):
    __slots__ = ("views",)
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    views: _containers.RepeatedCompositeFieldContainer[RankReport]
    def __init__(self, views: _Optional[_Iterable[_Union[RankReport, _Mapping]]] = ...) -> None: ...

class BlockRanges(_message.Message):
    __slots__ = ("key", "low", "high")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    key: _containers.RepeatedScalarFieldContainer[int]
    low: _containers.RepeatedScalarFieldContainer[float]
    high: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, key: _Optional[_Iterable[int]] = ..., low: _Optional[_Iterable[float]] = ..., high: _Optional[_Iterable[float]] = ...) -> None: ...

class RoundRanges(_message.Message):
    __slots__ = ("views",)
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    views: _containers.RepeatedCompositeFieldContainer[BlockRanges]
    def __init__(self, views: _Optional[_Iterable[_Union[BlockRanges, _Mapping]]] = ...) -> None: ...

class OpenedReport(_message.Message):
    __slots__ = ("run_id", "epoch", "head", "created")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    head: _manifest_pb2.VersionManifest
    created: bool
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., head: _Optional[_Union[_manifest_pb2.VersionManifest, _Mapping]] = ..., created: bool = ...) -> None: ...

class RoundPlan(_message.Message):
    __slots__ = ("number", "learn", "anchor_reason", "adopted")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEARN_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_REASON_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    number: int
    learn: bool
    anchor_reason: str
    adopted: _manifest_pb2.VersionManifest
    def __init__(self, number: _Optional[int] = ..., learn: bool = ..., anchor_reason: _Optional[str] = ..., adopted: _Optional[_Union[_manifest_pb2.VersionManifest, _Mapping]] = ...) -> None: ...
