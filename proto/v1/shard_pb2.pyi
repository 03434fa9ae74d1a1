from weight_sync.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IntStream(_message.Message):
    __slots__ = ("count", "low_bits", "symbols_size", "bits_size", "pco")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LOW_BITS_FIELD_NUMBER: _ClassVar[int]
    SYMBOLS_SIZE_FIELD_NUMBER: _ClassVar[int]
    BITS_SIZE_FIELD_NUMBER: _ClassVar[int]
    PCO_FIELD_NUMBER: _ClassVar[int]
    count: int
    low_bits: int
    symbols_size: int
    bits_size: int
    pco: bool
    def __init__(self, count: _Optional[int] = ..., low_bits: _Optional[int] = ..., symbols_size: _Optional[int] = ..., bits_size: _Optional[int] = ..., pco: bool = ...) -> None: ...

class ClassStreams(_message.Message):
    __slots__ = ("low_bits", "groups", "streams")
    LOW_BITS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    low_bits: bytes
    groups: bytes
    streams: _containers.RepeatedCompositeFieldContainer[IntStream]
    def __init__(self, low_bits: _Optional[bytes] = ..., groups: _Optional[bytes] = ..., streams: _Optional[_Iterable[_Union[IntStream, _Mapping]]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("regions", "elements", "changes", "size", "blake3", "gaps", "large_gaps", "large_steps", "new_bits_size", "lanes", "class_ids", "class_wide", "class_counts", "class_gaps", "class_steps", "class_tables")
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
    CLASS_IDS_FIELD_NUMBER: _ClassVar[int]
    CLASS_WIDE_FIELD_NUMBER: _ClassVar[int]
    CLASS_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CLASS_GAPS_FIELD_NUMBER: _ClassVar[int]
    CLASS_STEPS_FIELD_NUMBER: _ClassVar[int]
    CLASS_TABLES_FIELD_NUMBER: _ClassVar[int]
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
    class_ids: bytes
    class_wide: bytes
    class_counts: _containers.RepeatedScalarFieldContainer[int]
    class_gaps: ClassStreams
    class_steps: ClassStreams
    class_tables: bytes
    def __init__(self, regions: _Optional[_Iterable[_Union[_common_pb2.Region, _Mapping]]] = ..., elements: _Optional[int] = ..., changes: _Optional[int] = ..., size: _Optional[int] = ..., blake3: _Optional[bytes] = ..., gaps: _Optional[_Union[IntStream, _Mapping]] = ..., large_gaps: _Optional[_Union[IntStream, _Mapping]] = ..., large_steps: _Optional[_Union[IntStream, _Mapping]] = ..., new_bits_size: _Optional[int] = ..., lanes: _Optional[int] = ..., class_ids: _Optional[bytes] = ..., class_wide: _Optional[bytes] = ..., class_counts: _Optional[_Iterable[int]] = ..., class_gaps: _Optional[_Union[ClassStreams, _Mapping]] = ..., class_steps: _Optional[_Union[ClassStreams, _Mapping]] = ..., class_tables: _Optional[bytes] = ...) -> None: ...

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
