"""A site elsewhere, for tests of real hosts: an engine's API as a small server, and a real sidecar in front of it.

Owns both processes' ends. The sidecar follows the run that the host publishes into memory of its own (`HeldEngine`), so
what it says about versions is true; the tokens of an answer are dice.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from weight_sync.config import Config
from weight_sync.testing import MemoryEngine

LIMIT_S = 180.0


class HeldEngine(MemoryEngine):
    """The engine ``held`` of the sidecar: weights in the sidecar's own process."""

    control_routes = ()

    def __init__(self, url: str, config: Config) -> None:
        assert config.base is not None
        super().__init__(config.base, changes_tensors=False)

    def alive(self, timeout: float) -> bool:
        return True


class Site:
    """Attributes: url, of the sidecar; asked, the bodies that reached the engine; folder, with both logs."""

    def __init__(self, folder: Path, words: range, likely: float) -> None:
        self.asked: list[dict[str, Any]] = []
        self.folder, self.url = folder, ""
        dice, site = random.Random(0), self

        class Api(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._say({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                site.asked.append(body)
                limit = body.get("max_tokens") or body.get("sampling_params", {}).get("max_new_tokens") or 4
                self._say(answer(self.path, dice.choices(words, k=min(limit, 4)), likely))

            def _say(self, document: dict[str, Any]) -> None:
                data = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
        self.server.daemon_threads = True
        Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/weight_sync/status", timeout=20) as told:
            return dict(json.load(told))

    def reached(self, version: int) -> None:
        """Returns once that version, or a later one, is served."""
        deadline = time.monotonic() + LIMIT_S
        while (found := self.status)["version"] is None or found["version"] < version or not found["open"]:
            assert time.monotonic() < deadline, (found, (self.folder / "sidecar.log").read_text()[-2000:])
            time.sleep(0.02)


def answer(path: str, tokens: list[int], logprob: float) -> dict[str, Any]:
    """In the shape of the API at ``path``."""
    likely = [logprob] * len(tokens)
    if path == "/generate":
        triples = [[p, token, None] for p, token in zip(likely, tokens, strict=True)]
        return {"text": "x", "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": triples}}
    choice = {
        "index": 0,
        "text": "x",
        "token_ids": tokens,
        "finish_reason": "stop",
        "logprobs": {"token_logprobs": likely},
    }
    return {"choices": [choice]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def remote_site(
    folder: Path, uri: str, base: Path, words: range = range(3, 60), likely: float = -0.5
) -> Iterator[Site]:
    """Listens at once; serves when the run at ``uri`` is there. ``words``: the tokens of answers, ``likely``: the logprob
    of each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / "site" / "held_engine-1.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: held-engine\nVersion: 1\n")
    (found / "entry_points.txt").write_text("[weight_sync.engines]\nheld = remote_site:HeldEngine\n")
    paths = [str(found.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    site = Site(folder, words, likely)
    command = [
        sys.executable, "-c", "from weight_sync.cli import main; main()", "sidecar", "--engine", "held",
        "--engine-url", f"http://127.0.0.1:{site.server.server_port}", "--from", uri, "--listen", "127.0.0.1:0",
        "--json", "--set=poll_s=0.02", "--set=threads=1", "--set=replica_id=site", f"--base={base}",
    ]  # fmt: skip
    with (folder / "sidecar.out").open("w") as out, (folder / "sidecar.log").open("w") as log:
        own = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        sidecar = subprocess.Popen(command, stdout=out, stderr=log, env=own)
    try:
        site.url = _address(sidecar, folder)
        yield site
    finally:
        sidecar.kill()
        sidecar.wait(30)
        site.server.shutdown()


def _address(sidecar: subprocess.Popen[bytes], folder: Path) -> str:
    """Where it listens, as it says itself."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        for line in (folder / "sidecar.out").read_text().splitlines():
            told = json.loads(line)
            if "listening" in told:
                return str(told["listening"])
        assert sidecar.poll() is None, (folder / "sidecar.log").read_text()
        assert time.monotonic() < deadline, "the sidecar does not listen"
        time.sleep(0.05)
