"""Claims about bad stores, bad input and bad names: each gives a typed error with advice, and changes nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from file_store import check_everything_readable, objects, opened, publish, reader, shard, version

from weight_sync.config import Config, load
from weight_sync.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    InputError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
    VersionExpiredError,
    VersionMissingError,
    WeightSyncError,
)
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.transport.file import FileTransport
from weight_sync.transport.file.store import SMALL_OBJECT, Store
from weight_sync.version import ANCHOR, PATCH


@pytest.fixture
def memory(tmp_path: Path) -> Config:
    return Config(uri=f"memory://{tmp_path.name}", poll_s=0.02, timeout_s=10)


@pytest.fixture
def folder(tmp_path: Path) -> Config:
    return Config(uri=str(tmp_path / "store"), poll_s=0.02, timeout_s=10)


# --- configuration ---


@pytest.mark.parametrize("uri", ["ftp://host/x", "http://host/x", "S4://bucket", "s3a://bucket"])
def test_an_unknown_scheme_is_named_beside_the_valid_ones(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FileTransport(Config(uri=uri))
    assert uri.partition("://")[0].lower() in str(caught.value)
    for scheme in ("file://", "s3://", "gs://", "az://", "memory://"):
        assert scheme in str(caught.value)


@pytest.mark.parametrize(
    "uri", ["", "  ", "file://", "file://otherhost/x", "s3://", "s3://bucket/x?region=a", "memory://"]
)
def test_a_uri_that_names_no_store_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"weight_sync\.uri"):
        FileTransport(Config(uri=uri))


def test_a_plain_path_and_a_file_uri_are_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    publish(opened(Config(uri="a b#1%41")))
    for uri in (str(tmp_path / "a b#1%41"), (tmp_path / "a b#1%41").as_uri(), "./a b#1%41/"):
        assert check_everything_readable(reader(Config(uri=uri))) == [0]


def test_bad_store_options_are_the_configurations_fault() -> None:
    with pytest.raises(ConfigError, match="bogus"):
        FileTransport(Config(uri="s3://bucket", store_options={"bogus": "1"}))
    with pytest.raises(ConfigError, match="allow_http"):
        FileTransport(Config(uri="s3://bucket", store_options={"allow_http": "perhaps"}))


@pytest.mark.parametrize("uri", ["gs://bucket/prefix", "az://container/prefix"])
def test_google_and_azure_stores_open(uri: str) -> None:
    options = {"account_name": "a", "account_key": "YWFh"} if uri.startswith("az") else {"skip_signature": "true"}
    FileTransport(Config(uri=uri, store_options=options))


@pytest.mark.parametrize("name", ["", "..", "a/b", "../x", "a..b", ".hidden", "ü", "x" * 129, "runs", "latest", "a\n"])
def test_names_that_would_leave_their_folder_are_refused(memory: Config, name: str) -> None:
    end = FileTransport(memory).publisher_end(0, 1)
    with pytest.raises(ConfigError):
        end.open_run(name, fork_of=None, writer="w")
    with pytest.raises(ConfigError):
        reader(memory, name)
    if name in ("runs", "latest"):
        return
    end.open_run("r", fork_of=None, writer="w")
    follower = reader(memory)
    for call in (follower.lease, follower.want):
        with pytest.raises(ConfigError):
            call(name, *((0, 1) if call == follower.lease else (0,)))
    with pytest.raises(ConfigError):
        follower.release(name)
    with pytest.raises(ConfigError):
        end.put_shard(0, shard(name))
    assert Store(memory).list("r") == []


def test_ranks_and_calls_out_of_order_are_refused(memory: Config) -> None:
    with pytest.raises(InputError, match="rank"):
        FileTransport(memory).publisher_end(2, 2)
    end = FileTransport(memory).publisher_end(0, 1)
    for call in (end.next_number, end.acknowledgements, end.wants, end.reader):
        with pytest.raises(InputError, match="no run is open"):
            call()


def test_a_reader_of_a_mistyped_folder_makes_nothing_there(folder: Config) -> None:
    follower = reader(folder)
    assert (follower.head(), follower.newest_run(), follower.wait(None, 0)) == (None, None, None)
    for call in (follower.run_id, lambda: follower.manifest(0), lambda: next(follower.entries())):
        with pytest.raises(VersionMissingError, match="store holds no run"):
            call()
    assert not Path(folder.uri).exists()


# --- hostile or broken objects ---


def entry(**changes: object) -> manifest_pb2.VersionManifest:
    fields = {"format": 1, "run_id": "r", "number": 1, "epoch": 0, "kind": PATCH, "parent": 0, "nonce": bytes(16)}
    return manifest_pb2.VersionManifest(**{**fields, **changes})  # type: ignore[arg-type]


def with_shard(**changes: object) -> manifest_pb2.VersionManifest:
    manifest = entry()
    key = f"data/{1:020d}/0-0-patch-ab.safetensors"
    fields = {"object": key, "size": 8, "blake3": bytes(32), "head_size": 4, "head_blake3": bytes(32)}
    manifest.views.add(name="default").shards.add(**{**fields, **changes})  # type: ignore[arg-type]
    return manifest


HOSTILE_KEYS = [
    "",
    "/etc/passwd",
    "../other/data/x.safetensors",
    "runs/00000000.pb",
    "leases/a.pb",
    f"data/{1:020d}/../../../secret.safetensors",
    f"data/{1:020d}/..safetensors",
    f"data/{1:020d}/a/b.safetensors",
    f"data/{2:020d}/0-0-patch-ab.safetensors",
    f"data/{1:020d}/x.safetensors\n",
    f"data/{1:020d}/x.pb",
    f"data/{1:020d}/\u202ex.safetensors",
    f"/data/{1:020d}/x.safetensors",
    "data/1/x.safetensors",
]


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_a_hostile_manifest_cannot_point_outside_its_version(memory: Config, key: str) -> None:
    publish(opened(memory))
    manifest = with_shard(object=key)
    Store(memory).put(f"r/log/{1:020d}.pb", manifest.SerializeToString())
    follower = reader(memory)
    with pytest.raises(FormatError, match="shard outside"):
        follower.manifest(1)
    with pytest.raises(FormatError, match="shard outside"):
        follower.head()
    if not key.startswith(f"data/{2:020d}/"):  # a reference alone does not say of which version it is
        with pytest.raises(FormatError, match="shard outside"):
            follower.read(manifest.views[0].shards[0], 0, 1)


@pytest.mark.parametrize(
    ("data", "kind", "word"),
    [
        (b"", CorruptionError, "no format"),
        (b"\xff\xff\xff", CorruptionError, "not a VersionManifest"),
        (entry().SerializeToString()[:-3], CorruptionError, "not a VersionManifest"),
        (entry(format=2).SerializeToString(), FormatError, "reads format 2"),
        (entry(run_id="other").SerializeToString(), CorruptionError, "other/1"),
        (entry(number=2).SerializeToString(), CorruptionError, "r/2"),
        (entry(kind=0).SerializeToString(), FormatError, "unknown kind"),
        (entry(kind=99).SerializeToString(), FormatError, "unknown kind"),
        (entry(parent=1).SerializeToString(), CorruptionError, "future"),
        (entry(epoch=2).SerializeToString(), CorruptionError, "future"),
        (with_shard(blake3=b"").SerializeToString(), CorruptionError, "hashes of 0"),
        (with_shard(head_size=9).SerializeToString(), CorruptionError, "head 9 of 8"),
    ],
)
def test_a_broken_entry_is_named_and_never_believed(
    memory: Config, data: bytes, kind: type[WeightSyncError], word: str
) -> None:
    publish(opened(memory))
    Store(memory).put(f"r/log/{1:020d}.pb", data)
    for call in (lambda: reader(memory).manifest(1), lambda: list(reader(memory).entries()), reader(memory).head):
        with pytest.raises(kind, match=word) as caught:
            call()
        assert f"/r/log/{1:020d}.pb" in str(caught.value)


def test_an_entry_of_the_wrong_epoch_or_parent_makes_the_log_inconsistent(memory: Config) -> None:
    publish(opened(memory))
    opened(memory)
    publish(opened(memory))
    for bad in (entry(number=4, epoch=1), entry(number=4, epoch=2, parent=2)):
        Store(memory).put(f"r/log/{4:020d}.pb", bad.SerializeToString())
        with pytest.raises(CorruptionError, match="inconsistent"):
            list(reader(memory).entries())
        with pytest.raises(CorruptionError, match="inconsistent"):
            list(reader(memory).entries(4))


def test_a_bad_view_name_is_refused(memory: Config) -> None:
    publish(opened(memory))
    manifest = entry()
    manifest.views.add(name="../x")
    Store(memory).put(f"r/log/{1:020d}.pb", manifest.SerializeToString())
    with pytest.raises(FormatError, match="view name"):
        reader(memory).manifest(1)


def test_a_publisher_does_not_write_what_readers_refuse(memory: Config) -> None:
    end = opened(memory)
    bad = version(end, 0, ANCHOR, None)
    bad.views[0].shards.add(object="../x", size=1)
    with pytest.raises(FormatError):
        end.commit(bad)
    assert reader(memory).head() is None


def test_a_hole_in_the_log_is_no_end_of_it(memory: Config) -> None:
    end = opened(memory)
    for _ in range(4):
        publish(end)
    Store(memory).delete("latest")
    Store(memory).delete(f"r/log/{2:020d}.pb")
    for call in (reader(memory).head, lambda: opened(memory)):
        with pytest.raises(StoreError, match=f"hole.*{2:020d}"):
            call()


@pytest.mark.parametrize(
    ("record", "kind", "word"),
    [
        (b"\xff", CorruptionError, "not a RunRecord"),
        (manifest_pb2.RunRecord(format=3, run_id="r").SerializeToString(), FormatError, "format 3"),
        (manifest_pb2.RunRecord(format=1, run_id="../x").SerializeToString(), FormatError, "run id"),
        (manifest_pb2.RunRecord(format=1, run_id="runs").SerializeToString(), FormatError, "run id"),
    ],
)
def test_a_broken_record_of_a_run_is_named(
    memory: Config, record: bytes, kind: type[WeightSyncError], word: str
) -> None:
    Store(memory).put(f"runs/{0:08d}.pb", record)
    for call in (lambda: opened(memory), reader(memory).newest_run):
        with pytest.raises(kind, match=word) as caught:
            call()
        assert "/runs/00000000.pb" in str(caught.value)


def test_an_entry_of_absurd_size_is_not_loaded(folder: Config) -> None:
    publish(opened(folder))
    with open(Path(folder.uri, "r", "log", f"{1:020d}.pb"), "wb") as file:
        file.truncate(SMALL_OBJECT + 1)  # sparse: takes no space
    with pytest.raises(CorruptionError, match="too large"):
        reader(folder).manifest(1)


@pytest.fixture
def bucket(s3_uri: tuple[str, dict[str, str]]) -> Config:
    return Config(uri=s3_uri[0], store_options=s3_uri[1], timeout_s=10)


@pytest.mark.parametrize("kind", ["memory", "folder", "bucket"])
def test_a_truncated_or_missing_shard_is_told_apart(request: pytest.FixtureRequest, kind: str) -> None:
    config: Config = request.getfixturevalue(kind)
    publish(opened(config), body=b"0123456789")
    follower = reader(config)
    ref = follower.manifest(0).views[0].shards[0]
    for offset, length in ((-1, 1), (0, ref.size + 1), (ref.size, 1), (0, -1)):
        with pytest.raises(CorruptionError, match="range leaves"):
            follower.read(ref, offset, length)
    Store(config).put(f"r/{ref.object}", b"headshort")
    assert follower.read(ref, 0, 9) == b"headshort"
    assert follower.read(ref, 5, 3) == b"hor"
    for offset, length in ((0, ref.size), (8, 3), (9, 1), (ref.size - 1, 1)):
        with pytest.raises(CorruptionError, match="shorter"):
            follower.read(ref, offset, length)
    Store(config).delete(f"r/{ref.object}")
    with pytest.raises(VersionExpiredError, match="gone"):
        follower.read(ref, 0, 1)


# --- stores that refuse or fail ---


def test_a_full_disk_changes_nothing_and_publishing_goes_on_once_there_is_space(small_disk: Path) -> None:
    config = Config(uri=str(small_disk / "store"), timeout_s=10)
    end = opened(config)
    publish(end)
    for size in (2 << 20, 20 << 20):  # in one put, and in parts
        with pytest.raises(StoreFullError, match=r"data/.*gc"):
            end.put_shard(1, shard(body=bytes(size)))
    assert len(objects(config)) == 1
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(StoreFullError, match=f"log/{1:020d}"):
        end.commit(version(end, 1, PATCH, 0))
    assert reader(config).head() == 0
    assert list(small_disk.rglob("*#*")) == []
    filler.unlink()
    assert publish(end) == 1
    assert check_everything_readable(reader(config)) == [0, 1]


def test_a_read_only_store_can_be_read_and_says_what_it_refuses(small_disk: Path) -> None:
    config = Config(uri=str(small_disk / "store"), timeout_s=10, keep_versions=1)
    end = opened(config)
    publish(end)
    publish(end, ANCHOR)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    follower = reader(config)
    assert check_everything_readable(follower) == [0, 1]
    calls = {
        "data/": lambda: end.put_shard(2, shard()),
        f"log/{2:020d}": lambda: end.commit(version(end, 2, PATCH, 1)),
        f"log/{2:020d}.pb": lambda: opened(config),
        "leases/a": lambda: follower.lease("a", 0, 1),
        "probe": end.collect,
        "x": lambda: opened(Config(uri=str(small_disk / "x"))),
    }
    for name, call in calls.items():
        with pytest.raises(StoreReadOnlyError, match=name):
            call()
    assert follower.head() == 1


def test_a_folder_below_a_file_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file/store"):
        opened(Config(uri=str(tmp_path / "file" / "store")))


def test_a_missing_bucket_is_not_an_empty_store(s3_uri: tuple[str, dict[str, str]]) -> None:
    config = Config(uri="s3://no-such-bucket/x", store_options=s3_uri[1], timeout_s=5)
    for call in (lambda: opened(config), reader(config).head, lambda: Store(config).list("x")):
        with pytest.raises(StoreError, match="create the bucket"):
            call()


def test_an_unreachable_store_may_pass(s3_uri: tuple[str, dict[str, str]]) -> None:
    options = {**s3_uri[1], "endpoint": "http://127.0.0.1:9"}
    config = load({"uri": "s3://bucket/x", "store_options": options, "timeout_s": 0.3})
    for call in (lambda: opened(config), reader(config).newest_run):
        with pytest.raises(StoreUnavailableError, match="s3://bucket/x/runs"):
            call()
    with pytest.raises(StoreUnavailableError, match="key"):
        Store(config).upload("key", 4, lambda: iter([memoryview(b"data")]))
