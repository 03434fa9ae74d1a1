from weight_sync.proto.v1 import common_pb2 as _common_pb2
from weight_sync.proto.v1 import contract_pb2 as _contract_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EntryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENTRY_KIND_UNSPECIFIED: _ClassVar[EntryKind]
    ENTRY_KIND_ANCHOR: _ClassVar[EntryKind]
    ENTRY_KIND_PATCH: _ClassVar[EntryKind]
    ENTRY_KIND_EPOCH: _ClassVar[EntryKind]
    ENTRY_KIND_ABORTED: _ClassVar[EntryKind]
    ENTRY_KIND_EXPIRED: _ClassVar[EntryKind]
ENTRY_KIND_UNSPECIFIED: EntryKind
ENTRY_KIND_ANCHOR: EntryKind
ENTRY_KIND_PATCH: EntryKind
ENTRY_KIND_EPOCH: EntryKind
ENTRY_KIND_ABORTED: EntryKind
ENTRY_KIND_EXPIRED: EntryKind

class RunRecord(_message.Message):
    __slots__ = ("format", "run_id", "parent", "created_by", "created_unix_ms")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    CREATED_BY_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    format: int
    run_id: str
    parent: _common_pb2.VersionId
    created_by: str
    created_unix_ms: int
    def __init__(self, format: _Optional[int] = ..., run_id: _Optional[str] = ..., parent: _Optional[_Union[_common_pb2.VersionId, _Mapping]] = ..., created_by: _Optional[str] = ..., created_unix_ms: _Optional[int] = ...) -> None: ...

class BaseReference(_message.Message):
    __slots__ = ("uri", "hf_id", "hf_revision")
    URI_FIELD_NUMBER: _ClassVar[int]
    HF_ID_FIELD_NUMBER: _ClassVar[int]
    HF_REVISION_FIELD_NUMBER: _ClassVar[int]
    uri: str
    hf_id: str
    hf_revision: str
    def __init__(self, uri: _Optional[str] = ..., hf_id: _Optional[str] = ..., hf_revision: _Optional[str] = ...) -> None: ...

class TensorEntry(_message.Message):
    __slots__ = ("spec", "changed", "digest")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.TensorSpec
    changed: int
    digest: _common_pb2.Digest
    def __init__(self, spec: _Optional[_Union[_common_pb2.TensorSpec, _Mapping]] = ..., changed: _Optional[int] = ..., digest: _Optional[_Union[_common_pb2.Digest, _Mapping]] = ...) -> None: ...

class ShardRef(_message.Message):
    __slots__ = ("object", "size", "blake3", "head_size", "head_blake3", "rank", "form")
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BLAKE3_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAD_BLAKE3_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    object: str
    size: int
    blake3: bytes
    head_size: int
    head_blake3: bytes
    rank: int
    form: _common_pb2.Form
    def __init__(self, object: _Optional[str] = ..., size: _Optional[int] = ..., blake3: _Optional[bytes] = ..., head_size: _Optional[int] = ..., head_blake3: _Optional[bytes] = ..., rank: _Optional[int] = ..., form: _Optional[_Union[_common_pb2.Form, str]] = ...) -> None: ...

class ViewManifest(_message.Message):
    __slots__ = ("name", "scheme", "digest", "tensors", "shards", "elements", "changed", "base")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    scheme: str
    digest: _common_pb2.Digest
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    shards: _containers.RepeatedCompositeFieldContainer[ShardRef]
    elements: int
    changed: int
    base: BaseReference
    def __init__(self, name: _Optional[str] = ..., scheme: _Optional[str] = ..., digest: _Optional[_Union[_common_pb2.Digest, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[ShardRef, _Mapping]]] = ..., elements: _Optional[int] = ..., changed: _Optional[int] = ..., base: _Optional[_Union[BaseReference, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("base", "base_view", "base_digest", "reference", "config")
    BASE_FIELD_NUMBER: _ClassVar[int]
    BASE_VIEW_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    base: _common_pb2.VersionId
    base_view: str
    base_digest: _common_pb2.Digest
    reference: BaseReference
    config: str
    def __init__(self, base: _Optional[_Union[_common_pb2.VersionId, _Mapping]] = ..., base_view: _Optional[str] = ..., base_digest: _Optional[_Union[_common_pb2.Digest, _Mapping]] = ..., reference: _Optional[_Union[BaseReference, _Mapping]] = ..., config: _Optional[str] = ...) -> None: ...

class Signature(_message.Message):
    __slots__ = ("key_id", "ed25519")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    ED25519_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    ed25519: bytes
    def __init__(self, key_id: _Optional[str] = ..., ed25519: _Optional[bytes] = ...) -> None: ...

class VersionManifest(_message.Message):
    __slots__ = ("format", "run_id", "number", "epoch", "kind", "parent", "step", "views", "base", "contract", "metadata", "writer", "reason", "created_unix_ms", "signature", "nonce", "terms", "adapter")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    format: int
    run_id: str
    number: int
    epoch: int
    kind: EntryKind
    parent: int
    step: int
    views: _containers.RepeatedCompositeFieldContainer[ViewManifest]
    base: BaseReference
    contract: _contract_pb2.ExecutionContract
    metadata: _containers.ScalarMap[str, str]
    writer: str
    reason: str
    created_unix_ms: int
    signature: Signature
    nonce: bytes
    terms: _contract_pb2.ContractTerms
    adapter: Adapter
    def __init__(self, format: _Optional[int] = ..., run_id: _Optional[str] = ..., number: _Optional[int] = ..., epoch: _Optional[int] = ..., kind: _Optional[_Union[EntryKind, str]] = ..., parent: _Optional[int] = ..., step: _Optional[int] = ..., views: _Optional[_Iterable[_Union[ViewManifest, _Mapping]]] = ..., base: _Optional[_Union[BaseReference, _Mapping]] = ..., contract: _Optional[_Union[_contract_pb2.ExecutionContract, _Mapping]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., writer: _Optional[str] = ..., reason: _Optional[str] = ..., created_unix_ms: _Optional[int] = ..., signature: _Optional[_Union[Signature, _Mapping]] = ..., nonce: _Optional[bytes] = ..., terms: _Optional[_Union[_contract_pb2.ContractTerms, _Mapping]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...
