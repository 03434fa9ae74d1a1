"""Real ``sglang`` servers on a CPU for tests, and what they are asked.

Owns their command line. Owns no claim. Two packages that sglang imports and no CPU has are stubs/.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from servers import TEXT, Server

STUBS = Path(__file__).resolve().parent / "stubs"


class SglangServer(Server):
    """See `Server`. ``door`` "none": without weight_sync's plugin."""

    kind = "sglang"
    environment: ClassVar[dict[str, str]] = {
        "PYTHONPATH": str(STUBS),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|0",  # more ranks than NUMA nodes have to be placed by hand
    }

    def command(self) -> list[str]:
        if self.door == "none":
            self.variables["SGLANG_PLUGINS"] = "none"
        return [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model), "--host", "127.0.0.1",
            "--port", str(self.port), "--device", "cpu", "--attention-backend", "torch_native",
            "--served-model-name", "tiny", "--context-length", "512", "--max-total-tokens", "4096",
            "--max-running-requests", "8", *self.options,
        ]  # fmt: skip

    def complete(self, prompt: str = TEXT, tokens: int = 12, timeout: float = 120.0) -> dict[str, Any]:
        """Greedy tokens with their logprobs, and those of the prompt, which is computed whole for them."""
        body = {"text": prompt, "sampling_params": _greedy(tokens), "return_logprob": True, "logprob_start_len": 0}
        told = self.post("/generate", body, timeout)["meta_info"]
        return {
            "tokens": [token for _, token, *_ in told["output_token_logprobs"]],
            "logprobs": [logprob for logprob, *_ in told["output_token_logprobs"]],
            "prompt": told["input_token_logprobs"],
        }

    def generate(self, tokens: Sequence[int], count: int, timeout: float = 120.0) -> dict[str, Any]:
        """Tokens after tokens, with logprobs; the prompt may come from the cache."""
        body = {"input_ids": list(tokens), "sampling_params": _greedy(count), "return_logprob": True}
        return dict(self.post("/generate", body, timeout))

    def load(self, checkpoint: Path) -> None:
        """By sglang's own full reload."""
        told = self.post("/update_weights_from_disk", {"model_path": str(checkpoint), "flush_cache": True})
        assert told["success"], told


def _greedy(count: int) -> dict[str, Any]:
    return {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
