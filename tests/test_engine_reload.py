"""Claims about loading modules anew whose kernels want other memory than the checkpoint's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weight_sync.adapters.engines.sglang.reload import originals, reload, remember  # noqa: E402


class Packing:
    """Processes as engines do: the weight becomes another parameter of another form, beside what is derived from it."""

    def process_weights_after_loading(self, module: torch.nn.Module) -> None:
        loaded = module.weight
        packed = torch.nn.Parameter(loaded.data.t().contiguous().to(torch.float16), requires_grad=False)
        module.weight = packed
        module.register_buffer("total", loaded.data.sum(0).clone())
        module.largest = loaded.data.abs().max().clone()


def loaded_linear(rows: int, columns: int) -> torch.nn.Module:
    module = torch.nn.Linear(columns, rows, bias=True)
    module.weight.loader = "kept"
    module.quant_method = Packing()
    module.requires_grad_(False)
    return module


def load_into(module: torch.nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    assert module.weight.shape == weight.shape and module.weight.loader == "kept"
    module.weight.data.copy_(weight)
    module.bias.data.copy_(bias)


def test_a_packed_module_is_loaded_anew_as_after_a_start_into_the_memory_it_had() -> None:
    module = loaded_linear(6, 4)
    remember(module)
    assert originals(module) == {}, "nothing was replaced yet"
    module.quant_method.process_weights_after_loading(module)
    remember(module)  # a second time, as an engine's own reload would: what was loaded is known already
    assert set(originals(module)) == {"weight"} and originals(module)["weight"].shape == (6, 4)
    held = [module.weight, module.total, module.largest, module.bias]
    places = [tensor.data_ptr() for tensor in held]
    for seed in (1, 2):
        torch.manual_seed(seed)
        weight, bias = torch.randn(6, 4), torch.randn(6)
        reload([module], lambda weight=weight, bias=bias: load_into(module, weight, bias), torch.device("cpu"))
        fresh = loaded_linear(6, 4)
        load_into(fresh, weight, bias)
        fresh.quant_method.process_weights_after_loading(fresh)
        now = [module.weight, module.total, module.largest, module.bias]
        assert [tensor.data_ptr() for tensor in now] == places, "kernels point there"
        for mine, other in zip(now, [fresh.weight, fresh.total, fresh.largest, fresh.bias], strict=True):
            assert torch.equal(mine, other)


def test_a_module_that_is_not_packed_is_written_where_it_lies() -> None:
    module = torch.nn.Linear(4, 6).requires_grad_(False)
    remember(module)
    place = module.weight.data_ptr()
    new = torch.randn(6, 4)
    reload([module], lambda: module.weight.data.copy_(new), torch.device("cpu"))
    assert module.weight.data_ptr() == place and torch.equal(module.weight, new)
