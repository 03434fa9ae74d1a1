from weight_sync.proto.v1 import common_pb2 as _common_pb2
from weight_sync.proto.v1 import events_pb2 as _events_pb2
from weight_sync.proto.v1 import manifest_pb2 as _manifest_pb2
from weight_sync.proto.v1 import replica_pb2 as _replica_pb2
from weight_sync.proto.v1 import report_pb2 as _report_pb2
from weight_sync.proto.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FateOfNumber(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FATE_UNSPECIFIED: _ClassVar[FateOfNumber]
    FATE_OPEN: _ClassVar[FateOfNumber]
    FATE_COMMITTED: _ClassVar[FateOfNumber]
    FATE_ABORTED: _ClassVar[FateOfNumber]
FATE_UNSPECIFIED: FateOfNumber
FATE_OPEN: FateOfNumber
FATE_COMMITTED: FateOfNumber
FATE_ABORTED: FateOfNumber

class RunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class RunInfo(_message.Message):
    __slots__ = ("run_id", "newest_run", "head")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NEWEST_RUN_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    newest_run: str
    head: int
    def __init__(self, run_id: _Optional[str] = ..., newest_run: _Optional[str] = ..., head: _Optional[int] = ...) -> None: ...

class EntryRequest(_message.Message):
    __slots__ = ("run_id", "number")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    number: int
    def __init__(self, run_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class EntriesRequest(_message.Message):
    __slots__ = ("run_id", "first", "limit")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    first: int
    limit: int
    def __init__(self, run_id: _Optional[str] = ..., first: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("run_id", "after", "manifests")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    MANIFESTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    after: int
    manifests: bool
    def __init__(self, run_id: _Optional[str] = ..., after: _Optional[int] = ..., manifests: bool = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("run_id", "object", "fold", "offset", "length", "part", "parts")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    FOLD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    object: _manifest_pb2.ShardRef
    fold: FoldRequest
    offset: int
    length: int
    part: int
    parts: int
    def __init__(self, run_id: _Optional[str] = ..., object: _Optional[_Union[_manifest_pb2.ShardRef, _Mapping]] = ..., fold: _Optional[_Union[FoldRequest, _Mapping]] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class FoldRequest(_message.Message):
    __slots__ = ("view", "have", "target", "form", "regions", "next")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    view: str
    have: int
    target: int
    form: _common_pb2.Form
    regions: _containers.RepeatedCompositeFieldContainer[_common_pb2.Region]
    next: bool
    def __init__(self, view: _Optional[str] = ..., have: _Optional[int] = ..., target: _Optional[int] = ..., form: _Optional[_Union[_common_pb2.Form, str]] = ..., regions: _Optional[_Iterable[_Union[_common_pb2.Region, _Mapping]]] = ..., next: bool = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data", "size", "start", "absent", "stored", "target")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    size: int
    start: int
    absent: bool
    stored: _manifest_pb2.ShardRef
    target: int
    def __init__(self, data: _Optional[bytes] = ..., size: _Optional[int] = ..., start: _Optional[int] = ..., absent: bool = ..., stored: _Optional[_Union[_manifest_pb2.ShardRef, _Mapping]] = ..., target: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("replica_id", "run_id", "description", "ttl_s")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    run_id: str
    description: _replica_pb2.EngineDescription
    ttl_s: int
    def __init__(self, replica_id: _Optional[str] = ..., run_id: _Optional[str] = ..., description: _Optional[_Union[_replica_pb2.EngineDescription, _Mapping]] = ..., ttl_s: _Optional[int] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("ttl_s",)
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ttl_s: int
    def __init__(self, ttl_s: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReplicaRequest(_message.Message):
    __slots__ = ("run_id", "replica_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    replica_id: str
    def __init__(self, run_id: _Optional[str] = ..., replica_id: _Optional[str] = ...) -> None: ...

class AcknowledgeRequest(_message.Message):
    __slots__ = ("run_id", "acknowledgement")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    acknowledgement: _replica_pb2.Acknowledgement
    def __init__(self, run_id: _Optional[str] = ..., acknowledgement: _Optional[_Union[_replica_pb2.Acknowledgement, _Mapping]] = ...) -> None: ...

class TrajectoriesRequest(_message.Message):
    __slots__ = ("run_id", "batch")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch: _trajectory_pb2.TrajectoryBatch
    def __init__(self, run_id: _Optional[str] = ..., batch: _Optional[_Union[_trajectory_pb2.TrajectoryBatch, _Mapping]] = ...) -> None: ...

class TrajectoryReceipts(_message.Message):
    __slots__ = ("receipts",)
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.TrajectoryReceipt]
    def __init__(self, receipts: _Optional[_Iterable[_Union[_trajectory_pb2.TrajectoryReceipt, _Mapping]]] = ...) -> None: ...

class OpenRunRequest(_message.Message):
    __slots__ = ("run_id", "fork_of", "writer")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    fork_of: _common_pb2.VersionId
    writer: str
    def __init__(self, run_id: _Optional[str] = ..., fork_of: _Optional[_Union[_common_pb2.VersionId, _Mapping]] = ..., writer: _Optional[str] = ...) -> None: ...

class PublisherSession(_message.Message):
    __slots__ = ("run", "token", "rank", "world_size")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    run: _report_pb2.OpenedReport
    token: str
    rank: int
    world_size: int
    def __init__(self, run: _Optional[_Union[_report_pb2.OpenedReport, _Mapping]] = ..., token: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class PutShardRequest(_message.Message):
    __slots__ = ("session", "number", "label", "form", "head_size", "size", "data")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    session: PublisherSession
    number: int
    label: str
    form: _common_pb2.Form
    head_size: int
    size: int
    data: bytes
    def __init__(self, session: _Optional[_Union[PublisherSession, _Mapping]] = ..., number: _Optional[int] = ..., label: _Optional[str] = ..., form: _Optional[_Union[_common_pb2.Form, str]] = ..., head_size: _Optional[int] = ..., size: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "manifest")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    session: PublisherSession
    manifest: _manifest_pb2.VersionManifest
    def __init__(self, session: _Optional[_Union[PublisherSession, _Mapping]] = ..., manifest: _Optional[_Union[_manifest_pb2.VersionManifest, _Mapping]] = ...) -> None: ...

class NumberRequest(_message.Message):
    __slots__ = ("session", "number", "reason")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    session: PublisherSession
    number: int
    reason: str
    def __init__(self, session: _Optional[_Union[PublisherSession, _Mapping]] = ..., number: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class NumberReply(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class FateReply(_message.Message):
    __slots__ = ("fate",)
    FATE_FIELD_NUMBER: _ClassVar[int]
    fate: FateOfNumber
    def __init__(self, fate: _Optional[_Union[FateOfNumber, str]] = ...) -> None: ...

class TakeRequest(_message.Message):
    __slots__ = ("session", "limit")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    session: PublisherSession
    limit: int
    def __init__(self, session: _Optional[_Union[PublisherSession, _Mapping]] = ..., limit: _Optional[int] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("counts",)
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.ScalarMap[str, int]
    def __init__(self, counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("replica_id", "acknowledgement", "leased", "wants", "description")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    acknowledgement: _replica_pb2.Acknowledgement
    leased: int
    wants: int
    description: _replica_pb2.EngineDescription
    def __init__(self, replica_id: _Optional[str] = ..., acknowledgement: _Optional[_Union[_replica_pb2.Acknowledgement, _Mapping]] = ..., leased: _Optional[int] = ..., wants: _Optional[int] = ..., description: _Optional[_Union[_replica_pb2.EngineDescription, _Mapping]] = ...) -> None: ...

class FleetRequest(_message.Message):
    __slots__ = ("run_id", "session")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    session: PublisherSession
    def __init__(self, run_id: _Optional[str] = ..., session: _Optional[_Union[PublisherSession, _Mapping]] = ...) -> None: ...

class Fleet(_message.Message):
    __slots__ = ("run_id", "head", "replicas")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    head: int
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, run_id: _Optional[str] = ..., head: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class ErrorInfo(_message.Message):
    __slots__ = ("kind", "what", "field", "found", "expected", "do", "retry_after_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    DO_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    what: str
    field: str
    found: str
    expected: str
    do: str
    retry_after_s: float
    def __init__(self, kind: _Optional[str] = ..., what: _Optional[str] = ..., field: _Optional[str] = ..., found: _Optional[str] = ..., expected: _Optional[str] = ..., do: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...
