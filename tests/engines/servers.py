"""Real servers for tests: started, asked, stopped, killed. ``vllm serve`` here; other engines derive.

Owns the processes and plain HTTP. Owns no claim.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

START_S = 900.0  # of a machine that does much else; alone it takes 20 to 45
TEXT = "def main():\n    import os\n    return os.path.join('a', 'b')\n" * 6
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_CI_ENV": "1",  # no warm-up run
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # the models are tiny, and threads that wait for each other starve on a busy machine
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server; ``ready`` waits for it. A context manager that leaves no process behind.

    Attributes:
        kind: of the engine, as ``weight-sync sidecar --engine`` calls it.
        environment: that every such server is started with.
    """

    kind = "vllm"
    environment: ClassVar[dict[str, str]] = ENVIRONMENT

    def __init__(self, model: Path, folder: Path, *options: str, door: str = "transfer", **variables: str) -> None:
        self.model, self.folder, self.port = model, folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.options, self.door, self.variables = list(options), door, variables
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def command(self) -> list[str]:
        """What is run."""
        doors = {
            "transfer": ["--weight-transfer-config", '{"backend": "weight_sync"}'],
            "extension": ["--worker-extension-cls", "weight_sync.adapters.engines.vllm.extension.WorkerExtension"],
            "none": [],
        }
        return [
            str(Path(sys.executable).parent / "vllm"), "serve", str(self.model), "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "8",
            "--served-model-name", "tiny", "--enforce-eager", "--distributed-executor-backend",
            "mp" if "--tensor-parallel-size" in self.options else "uni", *_scale_out(),
            *doors[self.door], *self.options,
        ]  # fmt: skip

    def start(self) -> None:
        """Also again, after the one before has died."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / f"{self.kind}-{self.port}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder,
                start_new_session=True, env={**os.environ, **self.environment, **self.variables},
            )  # fmt: skip

    def ready(self) -> Server:
        """Waits until it answers."""
        assert self.process is not None
        end = time.monotonic() + START_S
        while True:
            try:
                self.get("/health")
                return self
            except OSError:
                tail = self.log.read_text(errors="replace")[-6000:]
                assert self.process.poll() is None, f"the server died:\n{tail}"
                assert time.monotonic() < end, f"the server did not start:\n{tail}"
                time.sleep(0.1)

    # --- asking ---

    def get(self, path: str, timeout: float = 30.0) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return _loaded(answer.read())

    def get_text(self, path: str, timeout: float = 30.0) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: dict[str, Any], timeout: float = 60.0) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return _loaded(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: HTTP {error.code}: {error.read().decode(errors='replace')}") from error

    def complete(self, prompt: str = TEXT, tokens: int = 12, timeout: float = 120.0) -> dict[str, Any]:
        """Greedy tokens with their logprobs, and those of the prompt."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1,
                "prompt_logprobs": 1, "return_token_ids": True, "ignore_eos": True}  # fmt: skip
        choice = self.post("/v1/completions", body, timeout)["choices"][0]
        return {
            "tokens": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "prompt": choice["prompt_logprobs"],
        }

    def generate(self, tokens: Sequence[int], count: int, timeout: float = 120.0) -> dict[str, Any]:
        """The route that tells versions by token."""
        body = {"model": "tiny", "token_ids": list(tokens), "sampling_params":
                {"max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 1}}  # fmt: skip
        return dict(self.post("/inference/v1/generate", body, timeout)["choices"][0])

    # --- the end ---

    def signal(self, number: int) -> None:
        """To every process of the server."""
        for pid in self.pids():
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, number)

    def pids(self) -> list[int]:
        """Of its session, children included."""
        assert self.process is not None
        out = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # gone meanwhile
            if int(words[3]) == self.process.pid:
                out.append(int(stat.parent.name))
        return out

    def kill(self) -> None:
        """At once, as a crash."""
        assert self.process is not None
        self.signal(signal.SIGKILL)
        self.process.wait(timeout=30)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        self.signal(signal.SIGCONT)
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):  # then it is killed
                self.process.wait(timeout=20)
        end = time.monotonic() + 30
        while self.pids() and time.monotonic() < end:
            self.signal(signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)


def _scale_out() -> list[str]:
    """Opens the route that tells versions by token, where this vLLM has it behind an option."""
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    options = Path(found.origin).parent / "entrypoints" / "launchers" / "cli_args.py"
    there = options.exists() and "enable_scale_out" in options.read_text()
    return ["--enable-scale-out"] if there else []


def _loaded(data: bytes) -> Any:
    if not data:
        return None
    try:
        return json.loads(data)
    except ValueError:  # some routes answer in words
        return data.decode()
