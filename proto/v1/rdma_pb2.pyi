from weight_sync.proto.v1 import layout_pb2 as _layout_pb2
from weight_sync.proto.v1 import manifest_pb2 as _manifest_pb2
from weight_sync.proto.v1 import replica_pb2 as _replica_pb2
from weight_sync.proto.v1 import service_pb2 as _service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WriteEntry(_message.Message):
    __slots__ = ("rank", "group", "tensor", "source", "target", "dtypes", "sizes", "offset", "strides", "target_offset", "target_strides")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    TARGET_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TARGET_STRIDES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    group: int
    tensor: int
    source: int
    target: int
    dtypes: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    strides: _containers.RepeatedScalarFieldContainer[int]
    target_offset: int
    target_strides: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rank: _Optional[int] = ..., group: _Optional[int] = ..., tensor: _Optional[int] = ..., source: _Optional[int] = ..., target: _Optional[int] = ..., dtypes: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., strides: _Optional[_Iterable[int]] = ..., target_offset: _Optional[int] = ..., target_strides: _Optional[_Iterable[int]] = ...) -> None: ...

class Writes(_message.Message):
    __slots__ = ("names", "writes")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    writes: _containers.RepeatedCompositeFieldContainer[WriteEntry]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., writes: _Optional[_Iterable[_Union[WriteEntry, _Mapping]]] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("agent", "metadata", "ranges")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    agent: str
    metadata: bytes
    ranges: _containers.RepeatedCompositeFieldContainer[MemoryRange]
    def __init__(self, agent: _Optional[str] = ..., metadata: _Optional[bytes] = ..., ranges: _Optional[_Iterable[_Union[MemoryRange, _Mapping]]] = ...) -> None: ...

class MemoryRange(_message.Message):
    __slots__ = ("key", "address", "nbytes", "device", "on_device")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    key: str
    address: int
    nbytes: int
    device: int
    on_device: bool
    def __init__(self, key: _Optional[str] = ..., address: _Optional[int] = ..., nbytes: _Optional[int] = ..., device: _Optional[int] = ..., on_device: bool = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("format", "token", "who")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    format: int
    token: str
    who: str
    def __init__(self, format: _Optional[int] = ..., token: _Optional[str] = ..., who: _Optional[str] = ...) -> None: ...

class OfferSource(_message.Message):
    __slots__ = ("rank", "world_size", "layout")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    layout: _layout_pb2.RankLayout
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., layout: _Optional[_Union[_layout_pb2.RankLayout, _Mapping]] = ...) -> None: ...

class Holds(_message.Message):
    __slots__ = ("number", "shards")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    shards: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.ShardRef]
    def __init__(self, number: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[_manifest_pb2.ShardRef, _Mapping]]] = ...) -> None: ...

class OfferTarget(_message.Message):
    __slots__ = ("replica_id", "rank", "world_size", "layout", "memory", "ring_bytes")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    RING_BYTES_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    rank: int
    world_size: int
    layout: _layout_pb2.RankLayout
    memory: Memory
    ring_bytes: int
    def __init__(self, replica_id: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., layout: _Optional[_Union[_layout_pb2.RankLayout, _Mapping]] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ..., ring_bytes: _Optional[int] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("replica_id", "number", "have")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    number: int
    have: int
    def __init__(self, replica_id: _Optional[str] = ..., number: _Optional[int] = ..., have: _Optional[int] = ...) -> None: ...

class Going(_message.Message):
    __slots__ = ("number", "nonce", "schedule", "senders", "shards", "offsets", "seconds")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    nonce: int
    schedule: bytes
    senders: _containers.RepeatedCompositeFieldContainer[Senders]
    shards: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.ShardRef]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    seconds: float
    def __init__(self, number: _Optional[int] = ..., nonce: _Optional[int] = ..., schedule: _Optional[bytes] = ..., senders: _Optional[_Iterable[_Union[Senders, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[_manifest_pb2.ShardRef, _Mapping]]] = ..., offsets: _Optional[_Iterable[int]] = ..., seconds: _Optional[float] = ...) -> None: ...

class Senders(_message.Message):
    __slots__ = ("rank", "trainers")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    trainers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rank: _Optional[int] = ..., trainers: _Optional[_Iterable[int]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("replica_id", "nonce")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    nonce: int
    def __init__(self, replica_id: _Optional[str] = ..., nonce: _Optional[int] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("replica_id", "schedule", "part", "writes", "targets", "groups", "barrier")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    schedule: bytes
    part: bytes
    writes: Writes
    targets: _containers.RepeatedCompositeFieldContainer[OfferTarget]
    groups: int
    barrier: bool
    def __init__(self, replica_id: _Optional[str] = ..., schedule: _Optional[bytes] = ..., part: _Optional[bytes] = ..., writes: _Optional[_Union[Writes, _Mapping]] = ..., targets: _Optional[_Iterable[_Union[OfferTarget, _Mapping]]] = ..., groups: _Optional[int] = ..., barrier: bool = ...) -> None: ...

class Go(_message.Message):
    __slots__ = ("replica_id", "number", "schedule", "nonce", "objects", "offsets", "sparse")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    number: int
    schedule: bytes
    nonce: int
    objects: _containers.RepeatedScalarFieldContainer[str]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    sparse: bool
    def __init__(self, replica_id: _Optional[str] = ..., number: _Optional[int] = ..., schedule: _Optional[bytes] = ..., nonce: _Optional[int] = ..., objects: _Optional[_Iterable[str]] = ..., offsets: _Optional[_Iterable[int]] = ..., sparse: bool = ...) -> None: ...

class Forget(_message.Message):
    __slots__ = ("replica_id",)
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    def __init__(self, replica_id: _Optional[str] = ...) -> None: ...

class Went(_message.Message):
    __slots__ = ("replica_id", "nonce", "rank", "error", "seconds", "nbytes")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    nonce: int
    rank: int
    error: _service_pb2.ErrorInfo
    seconds: float
    nbytes: int
    def __init__(self, replica_id: _Optional[str] = ..., nonce: _Optional[int] = ..., rank: _Optional[int] = ..., error: _Optional[_Union[_service_pb2.ErrorInfo, _Mapping]] = ..., seconds: _Optional[float] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Barrier(_message.Message):
    __slots__ = ("replica_id", "nonce", "rank", "group", "error")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    nonce: int
    rank: int
    group: int
    error: _service_pb2.ErrorInfo
    def __init__(self, replica_id: _Optional[str] = ..., nonce: _Optional[int] = ..., rank: _Optional[int] = ..., group: _Optional[int] = ..., error: _Optional[_Union[_service_pb2.ErrorInfo, _Mapping]] = ...) -> None: ...

class Entries(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.VersionManifest]
    def __init__(self, entries: _Optional[_Iterable[_Union[_manifest_pb2.VersionManifest, _Mapping]]] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("id", "answer", "hello", "offer_source", "holds", "offer_target", "ask", "going", "start", "assign", "go", "went", "forget", "barrier", "run", "run_info", "entry", "manifest", "entries", "entry_list", "acknowledge", "register", "lease", "want", "release", "trajectories", "receipts", "done", "error", "fetch", "chunk")
    ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OFFER_SOURCE_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    OFFER_TARGET_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    GOING_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    GO_FIELD_NUMBER: _ClassVar[int]
    WENT_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RUN_INFO_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ENTRY_LIST_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    id: int
    answer: bool
    hello: Hello
    offer_source: OfferSource
    holds: Holds
    offer_target: OfferTarget
    ask: Ask
    going: Going
    start: Start
    assign: Assign
    go: Go
    went: Went
    forget: Forget
    barrier: Barrier
    run: _service_pb2.RunRequest
    run_info: _service_pb2.RunInfo
    entry: _service_pb2.EntryRequest
    manifest: _manifest_pb2.VersionManifest
    entries: _service_pb2.EntriesRequest
    entry_list: Entries
    acknowledge: _service_pb2.AcknowledgeRequest
    register: _service_pb2.RegisterRequest
    lease: _replica_pb2.Lease
    want: _replica_pb2.Lease
    release: _service_pb2.ReplicaRequest
    trajectories: _service_pb2.TrajectoriesRequest
    receipts: _service_pb2.TrajectoryReceipts
    done: _service_pb2.Done
    error: _service_pb2.ErrorInfo
    fetch: _service_pb2.FetchRequest
    chunk: _service_pb2.Chunk
    def __init__(self, id: _Optional[int] = ..., answer: bool = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., offer_source: _Optional[_Union[OfferSource, _Mapping]] = ..., holds: _Optional[_Union[Holds, _Mapping]] = ..., offer_target: _Optional[_Union[OfferTarget, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., going: _Optional[_Union[Going, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., go: _Optional[_Union[Go, _Mapping]] = ..., went: _Optional[_Union[Went, _Mapping]] = ..., forget: _Optional[_Union[Forget, _Mapping]] = ..., barrier: _Optional[_Union[Barrier, _Mapping]] = ..., run: _Optional[_Union[_service_pb2.RunRequest, _Mapping]] = ..., run_info: _Optional[_Union[_service_pb2.RunInfo, _Mapping]] = ..., entry: _Optional[_Union[_service_pb2.EntryRequest, _Mapping]] = ..., manifest: _Optional[_Union[_manifest_pb2.VersionManifest, _Mapping]] = ..., entries: _Optional[_Union[_service_pb2.EntriesRequest, _Mapping]] = ..., entry_list: _Optional[_Union[Entries, _Mapping]] = ..., acknowledge: _Optional[_Union[_service_pb2.AcknowledgeRequest, _Mapping]] = ..., register: _Optional[_Union[_service_pb2.RegisterRequest, _Mapping]] = ..., lease: _Optional[_Union[_replica_pb2.Lease, _Mapping]] = ..., want: _Optional[_Union[_replica_pb2.Lease, _Mapping]] = ..., release: _Optional[_Union[_service_pb2.ReplicaRequest, _Mapping]] = ..., trajectories: _Optional[_Union[_service_pb2.TrajectoriesRequest, _Mapping]] = ..., receipts: _Optional[_Union[_service_pb2.TrajectoryReceipts, _Mapping]] = ..., done: _Optional[_Union[_service_pb2.Done, _Mapping]] = ..., error: _Optional[_Union[_service_pb2.ErrorInfo, _Mapping]] = ..., fetch: _Optional[_Union[_service_pb2.FetchRequest, _Mapping]] = ..., chunk: _Optional[_Union[_service_pb2.Chunk, _Mapping]] = ...) -> None: ...
