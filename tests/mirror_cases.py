"""What the tests of the mirror and of the checkpoint engine share: versions, comparisons, an engine behind HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from weight_sync import config as configuration
from weight_sync.adapters.engines.checkpoint import CheckpointEngine
from weight_sync.checkpoint import Checkpoint
from weight_sync.history import History
from weight_sync.publisher import Publisher
from weight_sync.registry import open_transport
from weight_sync.replica import Replica

State = dict[str, torch.Tensor]

ODD_NAMES = ["..", "a/b", "../../escape", "日本語 ☃", "__weight_sync__.x", "with\nnewline\x00", "", "model.safetensors"]
DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def randoms(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern, NaN and -0.0 included (booleans are 0 or 1)."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    count = size * int(torch.tensor(shape).prod()) if len(shape) else size
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(tuple(shape)) if count else torch.empty(tuple(shape), dtype=dtype)


def odd_state() -> State:
    """Odd names, all sorts of dtypes, 0-d and empty tensors."""
    state = {name: randoms((7, 3), torch.bfloat16, k) for k, name in enumerate(ODD_NAMES)}
    state |= {f"dtype.{dtype}": randoms((33,), dtype, k) for k, dtype in enumerate(DTYPES)}
    state |= {"scalar": randoms((), torch.float32, 1), "empty": torch.empty(0, dtype=torch.bfloat16)}
    state |= {"empty.2d": torch.empty(3, 0, dtype=torch.int32), "big": randoms((300, 200), torch.bfloat16, 5)}
    return state


def changed(state: Mapping[str, torch.Tensor], seed: int, names: Sequence[str] | None = None) -> State:
    """A copy in which some elements of the named tensors (default: all) have other bits."""
    out = {name: tensor.clone() for name, tensor in state.items()}
    for name in out if names is None else names:
        tensor = out[name]
        other = randoms(tensor.shape, tensor.dtype, seed)
        mask = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
        out[name] = torch.where(mask, other, tensor) if tensor.dtype.itemsize > 1 else other
    return out


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_holds(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """The folder's files hold these tensors and no others, bit for bit, and its index names them."""
    found: State = {}
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        part = load_file(file)
        assert not part.keys() & found.keys()
        found |= part
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t) for n, t in state.items()}
    index = folder / "model.safetensors.index.json"
    assert index.exists() == ([file.name for file in files] != ["model.safetensors"])
    if index.exists():
        names = json.loads(index.read_text())["weight_map"]
        assert {name: file.name for name, file in Checkpoint(folder).files.items()} == names


def write_base(folder: Path, files: Sequence[State]) -> State:
    """A checkpoint of several files with configuration and tokenizer; returns all tensors."""
    folder.mkdir(parents=True)
    state: State = {}
    for k, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{k + 1:05d}-of-{len(files):05d}.safetensors", {"format": "pt"})
        state |= tensors
    (folder / "config.json").write_text('{"model_type": "test"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("stale")
    return state


def publish(uri: Path | str, states: Sequence[State], base: Path | None = None, **keys: Any) -> list[int]:
    """Publishes the states in order; returns their numbers."""
    numbers = []
    with Publisher.open(str(uri), base, threads=1, **keys) as publisher:
        for state in states:
            report = publisher.publish(state, cast=False)
            assert report is not None
            numbers.append(report.version)
    return numbers


def lifecycle() -> list[State]:
    """A model over its life: changes, a tensor that comes, goes and returns, another shape, another dtype."""
    one = odd_state()
    two = changed(one, 1)
    three = changed(two, 2, ["big", "scalar", "a/b"]) | {"added": randoms((5, 5), torch.bfloat16, 9)}
    four = {name: tensor for name, tensor in changed(three, 3, ["added"]).items() if name != ".."}
    five = changed(four, 4, ["added"]) | {"big": randoms((100, 7), torch.bfloat16, 10)}
    six = changed(five, 5) | {"..": randoms((7, 3), torch.bfloat16, 11), "a/b": randoms((7, 3), torch.float32, 12)}
    return [one, two, three, four, five, six, changed(six, 6, ["scalar"]), changed(six, 7)]


def history_of(uri: Path, base: Path | None = None) -> History:
    config = configuration.load({"uri": str(uri), "timeout_s": 30})
    return History(open_transport(config).replica_end(), config.view, 1, None if base is None else str(base))


def follower(uri: Path | str, engine: CheckpointEngine, **keys: Any) -> Replica:
    return Replica.open(str(uri), engine, threads=1, poll_s=0.02, timeout_s=30.0, **keys)


class ServedEngine:
    """An engine behind HTTP that loads a folder when it is told to, and says which version it serves.

    POST /reload, /pause, /resume; GET /version. ``refuse`` holds the versions that it fails to load; ``lies`` makes it
    answer without loading.
    """

    def __init__(self, port: int = 0) -> None:
        self.refuse: set[int] = set()
        self.lies = False
        self.log: list[str] = []
        self.version: int | None = None
        self.digest = ""
        self.state: State = {}
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, text = engine.post(self.path, body)
                self.answer(status, text)

            def do_GET(self) -> None:
                if self.path == "/moved":
                    self.send_response(302)
                    self.send_header("Location", "/version")
                    self.end_headers()
                    return
                self.answer(200, json.dumps({"version": engine.version, "digest": engine.digest}))

            def answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: the log is ours."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        if path != "/reload":
            self.log.append(path.removeprefix("/"))
            return 200, "{}"
        self.log.append(f"reload {body['version']}")
        if body["version"] in self.refuse:
            return 500, "out of memory while loading"
        if not self.lies:
            self.load(Path(body["path"]))
            assert self.version == body["version"], "the folder is of the version that was told"
        return 200, "{}"

    def load(self, folder: Path) -> None:
        """Loads the folder as an engine at its start would."""
        checkpoint = Checkpoint(folder.resolve())
        self.state = {}
        for file in sorted(set(checkpoint.files.values())):
            self.state |= load_file(file)
        self.version = json.loads((folder / "weight_sync.json").read_text())["version"]
        self.digest = checkpoint.digest().hex()

    def options(self, **more: Any) -> dict[str, Any]:
        """For a CheckpointEngine that drives it."""
        return {
            "on_commit": f"{self.url}/reload", "check": f"{self.url}/version", "check_contains": "{digest}",
            "check_s": 0.3, "reload_s": 30.0, "threads": 1, **more,
        }  # fmt: skip

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(30)
        self._server.server_close()


_FOLLOWER = """
import json, sys
from weight_sync.adapters.engines.checkpoint import CheckpointEngine
from weight_sync.replica import Replica
Replica.open(sys.argv[1], CheckpointEngine(sys.argv[2], **json.loads(sys.argv[3])), threads=1, timeout_s=30.0).sync()
"""


_MATERIALIZER = """
import sys
from weight_sync.config import load
from weight_sync.history import History
from weight_sync.mirror import materialize
from weight_sync.registry import open_transport
config = load({"uri": sys.argv[1], "timeout_s": 30})
materialize(History(open_transport(config).replica_end(), config.view), int(sys.argv[2]), sys.argv[3])
"""


def materialize_until_killed(uri: Path, number: int, out: Path, crash_at: str) -> None:
    """A process of its own materializes a version and must die by SIGKILL at the step."""
    _killed([_MATERIALIZER, str(uri), str(number), str(out)], crash_at)


def follow_until_killed(uri: Path, path: Path, crash_at: str, options: Mapping[str, Any] | None = None) -> None:
    """A follower in a process of its own syncs once and must die by SIGKILL at the step."""
    _killed([_FOLLOWER, str(uri), str(path), json.dumps(dict(options or {}))], crash_at)


def _killed(program: list[str], crash_at: str) -> None:
    environment = {**os.environ, "WEIGHT_SYNC_CRASH_AT": crash_at}
    worker = subprocess.run([sys.executable, "-c", *program], env=environment, timeout=120, check=False)
    assert worker.returncode == -signal.SIGKILL
