from weight_sync.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IntStream(_message.Message):
    __slots__ = ("count", "low_bits", "high_size", "escape_count")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LOW_BITS_FIELD_NUMBER: _ClassVar[int]
    HIGH_SIZE_FIELD_NUMBER: _ClassVar[int]
    ESCAPE_COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    low_bits: int
    high_size: int
    escape_count: int
    def __init__(self, count: _Optional[int] = ..., low_bits: _Optional[int] = ..., high_size: _Optional[int] = ..., escape_count: _Optional[int] = ...) -> None: ...

class ClassRun(_message.Message):
    __slots__ = ("class_id", "low_bits", "counts")
    CLASS_ID_FIELD_NUMBER: _ClassVar[int]
    LOW_BITS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    class_id: int
    low_bits: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, class_id: _Optional[int] = ..., low_bits: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("regions", "elements", "changes", "size", "blake3", "gaps", "large_gaps", "large_steps", "new_bits_size", "lanes", "classes", "class_streams", "class_groups")
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BLAKE3_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    LARGE_GAPS_FIELD_NUMBER: _ClassVar[int]
    LARGE_STEPS_FIELD_NUMBER: _ClassVar[int]
    NEW_BITS_SIZE_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    CLASS_STREAMS_FIELD_NUMBER: _ClassVar[int]
    CLASS_GROUPS_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedCompositeFieldContainer[_common_pb2.Region]
    elements: int
    changes: int
    size: int
    blake3: bytes
    gaps: IntStream
    large_gaps: IntStream
    large_steps: IntStream
    new_bits_size: int
    lanes: int
    classes: _containers.RepeatedCompositeFieldContainer[ClassRun]
    class_streams: _containers.RepeatedCompositeFieldContainer[IntStream]
    class_groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, regions: _Optional[_Iterable[_Union[_common_pb2.Region, _Mapping]]] = ..., elements: _Optional[int] = ..., changes: _Optional[int] = ..., size: _Optional[int] = ..., blake3: _Optional[bytes] = ..., gaps: _Optional[_Union[IntStream, _Mapping]] = ..., large_gaps: _Optional[_Union[IntStream, _Mapping]] = ..., large_steps: _Optional[_Union[IntStream, _Mapping]] = ..., new_bits_size: _Optional[int] = ..., lanes: _Optional[int] = ..., classes: _Optional[_Iterable[_Union[ClassRun, _Mapping]]] = ..., class_streams: _Optional[_Iterable[_Union[IntStream, _Mapping]]] = ..., class_groups: _Optional[_Iterable[int]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("key", "region", "blake3")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    BLAKE3_FIELD_NUMBER: _ClassVar[int]
    key: str
    region: _common_pb2.Region
    blake3: bytes
    def __init__(self, key: _Optional[str] = ..., region: _Optional[_Union[_common_pb2.Region, _Mapping]] = ..., blake3: _Optional[bytes] = ...) -> None: ...

class ShardIndex(_message.Message):
    __slots__ = ("format", "run_id", "number", "rank", "view", "form", "tensors", "frames", "pieces")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    format: int
    run_id: str
    number: int
    rank: int
    view: str
    form: _common_pb2.Form
    tensors: _containers.RepeatedCompositeFieldContainer[_common_pb2.TensorSpec]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    def __init__(self, format: _Optional[int] = ..., run_id: _Optional[str] = ..., number: _Optional[int] = ..., rank: _Optional[int] = ..., view: _Optional[str] = ..., form: _Optional[_Union[_common_pb2.Form, str]] = ..., tensors: _Optional[_Iterable[_Union[_common_pb2.TensorSpec, _Mapping]]] = ..., frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ..., pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ...) -> None: ...
