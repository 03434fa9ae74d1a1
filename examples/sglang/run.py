"""A trainer, an SGLang server and the sidecar: the server answers while its weights change under it.

Owns the server's command line; ../following.py does the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from following import arguments, follow

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
CPU_ONLY = {"SGLANG_USE_CPU_ENGINE": "1"}


def command(model: Path, port: int) -> list[str]:
    """Starts SGLang."""
    serve = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1",
             "--port", str(port), "--served-model-name", "policy", "--context-length", "512",
             "--max-total-tokens", "4096"]  # fmt: skip
    return serve if torch.cuda.is_available() else [*serve, "--device", "cpu", "--attention-backend", "torch_native"]


if __name__ == "__main__":
    given = arguments(__doc__).parse_args()
    follow("sglang", command, ENVIRONMENT if torch.cuda.is_available() else {**CPU_ONLY, **ENVIRONMENT}, given)
