from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Enforcement(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENFORCEMENT_UNSPECIFIED: _ClassVar[Enforcement]
    ENFORCEMENT_NONE: _ClassVar[Enforcement]
    ENFORCEMENT_WARN: _ClassVar[Enforcement]
    ENFORCEMENT_STRICT: _ClassVar[Enforcement]
ENFORCEMENT_UNSPECIFIED: Enforcement
ENFORCEMENT_NONE: Enforcement
ENFORCEMENT_WARN: Enforcement
ENFORCEMENT_STRICT: Enforcement

class ExecutionContract(_message.Message):
    __slots__ = ("id", "model_revision", "served_format", "compute_dtype", "accumulation_dtype", "attention_backend", "batch_invariant", "deterministic", "tensor_parallel", "pipeline_parallel", "expert_parallel", "data_parallel", "reduction_order", "kernel_versions", "router_replay", "sampling", "engine", "engine_version")
    class KernelVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SamplingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    SERVED_FORMAT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATION_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    EXPERT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_ORDER_FIELD_NUMBER: _ClassVar[int]
    KERNEL_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_REPLAY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    id: str
    model_revision: str
    served_format: str
    compute_dtype: str
    accumulation_dtype: str
    attention_backend: str
    batch_invariant: bool
    deterministic: bool
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    data_parallel: int
    reduction_order: str
    kernel_versions: _containers.ScalarMap[str, str]
    router_replay: bool
    sampling: _containers.ScalarMap[str, str]
    engine: str
    engine_version: str
    def __init__(self, id: _Optional[str] = ..., model_revision: _Optional[str] = ..., served_format: _Optional[str] = ..., compute_dtype: _Optional[str] = ..., accumulation_dtype: _Optional[str] = ..., attention_backend: _Optional[str] = ..., batch_invariant: bool = ..., deterministic: bool = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., expert_parallel: _Optional[int] = ..., data_parallel: _Optional[int] = ..., reduction_order: _Optional[str] = ..., kernel_versions: _Optional[_Mapping[str, str]] = ..., router_replay: bool = ..., sampling: _Optional[_Mapping[str, str]] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ...) -> None: ...

class ContractTerm(_message.Message):
    __slots__ = ("field", "one_of", "at_most")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    ONE_OF_FIELD_NUMBER: _ClassVar[int]
    AT_MOST_FIELD_NUMBER: _ClassVar[int]
    field: str
    one_of: _containers.RepeatedScalarFieldContainer[str]
    at_most: float
    def __init__(self, field: _Optional[str] = ..., one_of: _Optional[_Iterable[str]] = ..., at_most: _Optional[float] = ...) -> None: ...

class ContractTerms(_message.Message):
    __slots__ = ("terms", "enforce", "profile")
    TERMS_FIELD_NUMBER: _ClassVar[int]
    ENFORCE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    terms: _containers.RepeatedCompositeFieldContainer[ContractTerm]
    enforce: Enforcement
    profile: str
    def __init__(self, terms: _Optional[_Iterable[_Union[ContractTerm, _Mapping]]] = ..., enforce: _Optional[_Union[Enforcement, str]] = ..., profile: _Optional[str] = ...) -> None: ...
