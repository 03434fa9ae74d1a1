from weight_sync.proto.v1 import common_pb2 as _common_pb2
from weight_sync.proto.v1 import manifest_pb2 as _manifest_pb2
from weight_sync.proto.v1 import replica_pb2 as _replica_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunStarted(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: _manifest_pb2.RunRecord
    def __init__(self, run: _Optional[_Union[_manifest_pb2.RunRecord, _Mapping]] = ...) -> None: ...

class EntryCommitted(_message.Message):
    __slots__ = ("version", "kind", "epoch", "parent", "manifest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.VersionId
    kind: _manifest_pb2.EntryKind
    epoch: int
    parent: int
    manifest: _manifest_pb2.VersionManifest
    def __init__(self, version: _Optional[_Union[_common_pb2.VersionId, _Mapping]] = ..., kind: _Optional[_Union[_manifest_pb2.EntryKind, str]] = ..., epoch: _Optional[int] = ..., parent: _Optional[int] = ..., manifest: _Optional[_Union[_manifest_pb2.VersionManifest, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("run_started", "entry_committed", "acknowledged")
    RUN_STARTED_FIELD_NUMBER: _ClassVar[int]
    ENTRY_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    run_started: RunStarted
    entry_committed: EntryCommitted
    acknowledged: _replica_pb2.Acknowledgement
    def __init__(self, run_started: _Optional[_Union[RunStarted, _Mapping]] = ..., entry_committed: _Optional[_Union[EntryCommitted, _Mapping]] = ..., acknowledged: _Optional[_Union[_replica_pb2.Acknowledgement, _Mapping]] = ...) -> None: ...
