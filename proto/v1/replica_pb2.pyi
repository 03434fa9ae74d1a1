from weight_sync.proto.v1 import common_pb2 as _common_pb2
from weight_sync.proto.v1 import contract_pb2 as _contract_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_ATTACHING: _ClassVar[ReplicaState]
    REPLICA_STATE_SERVING: _ClassVar[ReplicaState]
    REPLICA_STATE_STAGING: _ClassVar[ReplicaState]
    REPLICA_STATE_FENCED: _ClassVar[ReplicaState]
    REPLICA_STATE_IN_DOUBT: _ClassVar[ReplicaState]
    REPLICA_STATE_CLOSED: _ClassVar[ReplicaState]
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_ATTACHING: ReplicaState
REPLICA_STATE_SERVING: ReplicaState
REPLICA_STATE_STAGING: ReplicaState
REPLICA_STATE_FENCED: ReplicaState
REPLICA_STATE_IN_DOUBT: ReplicaState
REPLICA_STATE_CLOSED: ReplicaState

class EngineDescription(_message.Message):
    __slots__ = ("engine_id", "kind", "view", "tensors", "complete", "digest", "forms", "contract", "rank", "world_size", "host", "versions", "changes_tensors", "adapter_base")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FORMS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_TENSORS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BASE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    kind: str
    view: str
    tensors: _containers.RepeatedCompositeFieldContainer[_common_pb2.TensorSpec]
    complete: bool
    digest: _common_pb2.Digest
    forms: _containers.RepeatedScalarFieldContainer[_common_pb2.Form]
    contract: _contract_pb2.ExecutionContract
    rank: int
    world_size: int
    host: str
    versions: _containers.ScalarMap[str, str]
    changes_tensors: bool
    adapter_base: _common_pb2.Digest
    def __init__(self, engine_id: _Optional[str] = ..., kind: _Optional[str] = ..., view: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[_common_pb2.TensorSpec, _Mapping]]] = ..., complete: bool = ..., digest: _Optional[_Union[_common_pb2.Digest, _Mapping]] = ..., forms: _Optional[_Iterable[_Union[_common_pb2.Form, str]]] = ..., contract: _Optional[_Union[_contract_pb2.ExecutionContract, _Mapping]] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., host: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., changes_tensors: bool = ..., adapter_base: _Optional[_Union[_common_pb2.Digest, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("fetch", "decode", "pause", "apply", "verify")
    FETCH_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    fetch: float
    decode: float
    pause: float
    apply: float
    verify: float
    def __init__(self, fetch: _Optional[float] = ..., decode: _Optional[float] = ..., pause: _Optional[float] = ..., apply: _Optional[float] = ..., verify: _Optional[float] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ("replica_id", "version", "view", "state", "digest", "timings", "error", "sent_unix_ms", "fetched_bytes", "followers", "contract")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SENT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FOLLOWERS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    version: _common_pb2.VersionId
    view: str
    state: ReplicaState
    digest: _common_pb2.Digest
    timings: Timings
    error: str
    sent_unix_ms: int
    fetched_bytes: int
    followers: _containers.RepeatedCompositeFieldContainer[Followers]
    contract: _contract_pb2.ExecutionContract
    def __init__(self, replica_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.VersionId, _Mapping]] = ..., view: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., digest: _Optional[_Union[_common_pb2.Digest, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., error: _Optional[str] = ..., sent_unix_ms: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., followers: _Optional[_Iterable[_Union[Followers, _Mapping]]] = ..., contract: _Optional[_Union[_contract_pb2.ExecutionContract, _Mapping]] = ...) -> None: ...

class Followers(_message.Message):
    __slots__ = ("version", "state", "count", "error")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.VersionId
    state: ReplicaState
    count: int
    error: str
    def __init__(self, version: _Optional[_Union[_common_pb2.VersionId, _Mapping]] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., count: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("replica_id", "version", "ttl_s")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    version: _common_pb2.VersionId
    ttl_s: int
    def __init__(self, replica_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.VersionId, _Mapping]] = ..., ttl_s: _Optional[int] = ...) -> None: ...
