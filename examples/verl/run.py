"""verl trains; a follower that shares nothing with it but the store keeps a checkpoint folder; both must agree.

On a CPU, with a tiny model (MODEL=path for another): ``python run.py``. Owns the two processes and the comparison; the
trainer's command is main_ppo.sh, whose options a GPU job replaces (README.md).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from weight_sync.adapters.doctors import hydra
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.config import load
from weight_sync.history import view_of
from weight_sync.registry import open_transport

HERE = Path(__file__).resolve().parent
PATIENCE_S = 120.0


def head_of(uri: str) -> tuple[int, str]:
    """Number and digest of the newest version, as the trainer published it."""
    config = load({"uri": uri})
    end = open_transport(config).replica_end(None)
    number = end.head()
    if number is None:
        raise SystemExit(f"nothing was published; look at the trainer's output, and at `weight-sync log {uri}`")
    digest = Digest.from_proto(view_of(end.manifest(number), config.view).digest)
    end.close()
    return number, digest.hex()


def main() -> None:
    """Starts the follower, trains, and compares digests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="folder for model, store and copy; default: a temporary one")
    parser.add_argument("overrides", nargs="*", help="more options of verl")
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="weight_sync-verl-"))
    work.mkdir(parents=True, exist_ok=True)
    check = hydra()
    if not check.ok:
        raise SystemExit(f"{check.what}: {check.found}; {check.do}. `weight-sync doctor verl` looks at the rest")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE)])),
                 "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}  # fmt: skip
    subprocess.run([sys.executable, HERE / "tiny.py", work], check=True, env=variables)
    model = os.environ.get("MODEL", str(work / "tiny"))
    store, copy = str(work / "store"), work / "engine"
    command = "from weight_sync.cli import main; main()"
    follower = subprocess.Popen([sys.executable, "-c", command, "follow", store, "--base", model, "--out", str(copy)])
    try:
        train = [HERE / "main_ppo.sh", work, "+weight_sync=file", f"weight_sync.uri={store}",
                 f"actor_rollout_ref.model.path={model}", *args.overrides]  # fmt: skip
        subprocess.run([str(part) for part in train], check=True, env=variables)
        number, wanted = head_of(store)
        deadline = time.monotonic() + PATIENCE_S
        while not copy.exists() or (found := Checkpoint(copy.resolve()).digest().hex()) != wanted:
            if time.monotonic() > deadline or follower.poll() is not None:
                raise SystemExit(f"the follower is not at version {number}; look at `weight-sync status {store}` and "
                                 f"`weight-sync verify --deep {store}`")  # fmt: skip
            time.sleep(0.2)
    finally:
        follower.send_signal(signal.SIGTERM)
        follower.wait(timeout=60)
    print(f"trainer and engine agree: version {number}, digest {found}")


if __name__ == "__main__":
    main()
