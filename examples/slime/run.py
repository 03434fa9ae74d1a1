"""slime's real training actors on a CPU, publishing to a fleet that slime has no handles of; trainer and engine must agree.

``SLIME_SRC=<checkout of slime> python run.py``. Goes as far as a CPU allows: Megatron's optimizer and SGLang are stubbed
(slime_env.py), so a "training step" changes weights without learning. Owns the run; README.md has the GPU recipe.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Runs actors.py on the user's YAML and reads its verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--topology", default="2,1,1,0", help="tensor-, pipeline-, expert-parallel sizes; 1 for experts"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--syncs", type=int, default=4)
    args = parser.parse_args()
    if not os.environ.get("SLIME_SRC"):
        raise SystemExit("set SLIME_SRC to a checkout of slime; it is not on PyPI")
    work = Path(tempfile.mkdtemp(prefix="weight_sync-slime-"))
    block = yaml.safe_load((HERE / "ws.yaml").read_text())
    block["weight_sync"] |= {"uri": str(work / "store"), "poll_s": 0.02}
    (work / "ws.yaml").write_text(yaml.safe_dump(block))
    (work / "hf").mkdir()
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(HERE / "actors.py"), str(work), args.topology, str(args.ranks), str(args.syncs)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if done.returncode or len(results) != args.syncs or not all('"different": []' in line for line in results):
        raise SystemExit(f"trainer and engine differ, or a step failed; look at `weight-sync log {work / 'store'}` and "
                         f"`weight-sync verify --deep {work / 'store'}`")  # fmt: skip
    from weight_sync.cli import main as command_line

    print("trainer and engine agree after each sync; the digests:")
    sys.argv = ["weight-sync", "log", str(work / "store")]
    command_line()


if __name__ == "__main__":
    main()
