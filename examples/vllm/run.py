"""A trainer, a vLLM server and the sidecar: the server answers while its weights change under it.

Owns the server's command line; ../following.py does the rest.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from following import BIN, arguments, follow

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ONLY = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def command(model: Path, port: int, packed: bool) -> list[str]:
    """Starts vLLM."""
    serve = [str(BIN / "vllm"), "serve", str(model), "--port", str(port), "--host", "127.0.0.1",
             "--served-model-name", "policy", "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "8",
             "--enforce-eager", "--weight-transfer-config", '{"backend": "weight_sync"}']  # fmt: skip
    return serve if packed else [*serve, "--additional-config", '{"weight_sync": {"in_place": true}}']


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--packed", action="store_true", help="leave it to vLLM how CPU weights lie in memory")
    given = parser.parse_args()
    follow("vllm", partial(command, packed=given.packed), {**CPU_ONLY, **ENVIRONMENT}, given)
