from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Form(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORM_UNSPECIFIED: _ClassVar[Form]
    FORM_STEP: _ClassVar[Form]
    FORM_COMPACT: _ClassVar[Form]
    FORM_ABSOLUTE: _ClassVar[Form]
    FORM_RAW: _ClassVar[Form]
FORM_UNSPECIFIED: Form
FORM_STEP: Form
FORM_COMPACT: Form
FORM_ABSOLUTE: Form
FORM_RAW: Form

class Digest(_message.Message):
    __slots__ = ("lane0", "lane1")
    LANE0_FIELD_NUMBER: _ClassVar[int]
    LANE1_FIELD_NUMBER: _ClassVar[int]
    lane0: int
    lane1: int
    def __init__(self, lane0: _Optional[int] = ..., lane1: _Optional[int] = ...) -> None: ...

class VersionId(_message.Message):
    __slots__ = ("run_id", "number")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    number: int
    def __init__(self, run_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "code_bits")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODE_BITS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    code_bits: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., code_bits: _Optional[int] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("tensor", "offset", "sizes", "strides")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    offset: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tensor: _Optional[int] = ..., offset: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ...) -> None: ...
