"""What the examples of engines share: a trainer, a server and the sidecar; the server answers while its weights change.

Owns the processes and what is printed. Owns no engine's command line (vllm/run.py, sglang/run.py) and no training: steps
are random, of the size of an optimizer's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from weight_sync import Publisher

BIN = Path(sys.executable).parent
START_S = 600.0


def tiny_model(folder: Path) -> Path:
    """A random Qwen3 of half a million elements, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    signs = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({sign: place for place, sign in enumerate(signs)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>").save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(signs), hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=256, max_position_embeddings=512, initializer_range=0.08,
        tie_word_embeddings=False, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    name: str, command: list[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, its output in a file; the whole session ends with the block.

    What the user has set in the environment wins over ``environment``.
    """
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True,
                                   env={**environment, **os.environ})  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the URL answers with 200."""
    end = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=10).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{url} does not answer ({error}); {log} says:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)


def ask(url: str, prompt: str, at_least: int) -> tuple[str, Any, int]:
    """An ordinary OpenAI request, under ``at_least`` or a later version; its text, and the versions on the answer."""
    body = json.dumps({"model": "policy", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1}).encode()
    headers = {"Content-Type": "application/json", "X-Weight-Version-Min": str(at_least), "X-Weight-Version-Wait": "60"}
    try:
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            choice, version = json.load(answer)["choices"][0], int(answer.headers["X-Weight-Version-Start"])
            return choice["text"], choice["logprobs"]["token_logprobs"][0], version
    except urllib.error.HTTPError as error:
        sys.exit(f"HTTP {error.code}: {error.read().decode(errors='replace')}")


def step(state: dict[str, torch.Tensor], dice: torch.Generator) -> None:
    """Moves about 2 % of all elements by one ulp."""
    for tensor in state.values():
        tensor.view(torch.int16).bitwise_xor_((torch.rand(tensor.shape, generator=dice) < 0.02).to(torch.int16))


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all examples have."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="a bf16 checkpoint; default: a tiny random one")
    parser.add_argument("--versions", type=int, default=5)
    return parser


def follow(
    engine: str, command: Callable[[Path, int], list[str]], environment: Mapping[str, str], given: argparse.Namespace
) -> None:
    """Publishes versions and asks for each.

    Args:
        engine: as ``weight-sync sidecar --engine`` calls it.
        command: starts a server of a checkpoint, as the model ``policy``, on a port of this host.
        environment: of the server.
        given: what `arguments` parsed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = (given.model or tiny_model(folder / "model")).resolve()
        port, front = free_port(), f"127.0.0.1:{free_port()}"
        url = f"http://127.0.0.1:{port}"
        print(f"starting {engine}; this takes about a minute", flush=True)
        server = stack.enter_context(running(engine, command(model, port), folder, environment))
        state, dice = load_file(model / "model.safetensors"), torch.Generator().manual_seed(0)
        publisher = stack.enter_context(Publisher.open(str(folder / "run"), base=str(model)))
        wait_for(f"{url}/health", server, folder / f"{engine}.log")
        sidecar = [str(BIN / "weight-sync"), "sidecar", "--engine", engine, "--engine-url", url,
                   "--from", str(folder / "run"), "--listen", front]  # fmt: skip
        proxy = stack.enter_context(running("sidecar", sidecar, folder, {}))
        wait_for(f"http://{front}/readyz", proxy, folder / "sidecar.log")
        for _ in range(given.versions):
            step(state, dice)
            report = publisher.publish(state)
            text, logprob, version = ask(f"http://{front}", "weights go out, ", report.version)
            with urllib.request.urlopen(f"http://{front}/weight_sync/status", timeout=10) as status:
                seconds = json.load(status)["seconds"]
            print(f"version {version}: {report.changed:,} changes in {report.patch_bytes:,} bytes, "
                  f"pause {1e3 * seconds['pause']:.0f} ms; {text!r}, first logprob {logprob:.4f}", flush=True)  # fmt: skip
    print("done")
