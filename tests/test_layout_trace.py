"""Tracing and probing of converters, against numbers sent through them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import (
    elements,
)

from weight_sync.errors import UntraceableError
from weight_sync.layout import (
    learn_converter,
    probe_converter,
    take,
    trace_converter,
)


def _steps() -> dict[str, Callable[[torch.Tensor, int], torch.Tensor]]:
    def assigned(t: torch.Tensor, k: int) -> torch.Tensor:
        out = torch.empty_like(t)
        half = t.shape[0] // 2
        out[half:] = t[: t.shape[0] - half]
        out[:half] = t[t.shape[0] - half :]
        return out

    def twice_written(t: torch.Tensor, k: int) -> torch.Tensor:
        out = t.clone()
        out[..., : t.shape[-1] // 2] = t.reshape(-1)[0]
        out[k % t.shape[0]] = t[0]
        return out

    return {
        "transpose": lambda t, k: t.transpose(0, -1),
        "flatten": lambda t, k: t.reshape(-1, t.shape[-1]),
        "halves": lambda t, k: torch.cat(list(t.chunk(2, k % t.dim()))[::-1], k % t.dim()),
        "contiguous": lambda t, k: t.contiguous(),
        "rope": lambda t, k: (
            t.reshape(*t.shape[:-1], 2, -1).transpose(-1, -2).reshape(t.shape) if t.shape[-1] % 2 == 0 else t
        ),
        "stack": lambda t, k: torch.stack([t, t], k % (t.dim() + 1)) if t.numel() < 200 else t,
        "narrow": lambda t, k: t[1:] if t.shape[0] > 1 else t,
        "columns": lambda t, k: t[..., k % t.shape[-1] :],
        "thirds": lambda t, k: t.reshape(3, -1) if t.numel() % 3 == 0 else t,
        "expand": lambda t, k: t[None].expand(2, *t.shape) if t.numel() < 200 else t,
        "windows": lambda t, k: t.reshape(-1).unfold(0, 2, 1) if 1 < t.numel() < 200 else t,
        "every other": lambda t, k: t[k % 2 :: 2] if t.shape[0] > 1 else t,
        "assigned": assigned,
        "twice written": twice_written,
        "to cpu": lambda t, k: t.to("cpu", copy=True),
    }


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from(sorted(_steps())), st.integers(0, 7)), max_size=7),
)
@settings(max_examples=150, deadline=None)
def test_tracing_a_program_equals_sending_numbers_through_it(shape: list[int], program: list[tuple[str, int]]) -> None:
    steps = _steps()

    def convert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = torch.cat([state["a"], state["b"]], 0)
        for name, k in program:
            out = steps[name](out, k)
        return {"out": out, "a": state["a"]}

    sources = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in "ab"}
    size = sources["a"].numel()
    numbers = {name: torch.arange(i * size, (i + 1) * size).view(shape) for i, name in enumerate("ab")}
    truth = convert(numbers)["out"].reshape(-1).tolist()
    layout, refused = trace_converter(convert, sources)
    assert not refused
    assert elements(layout)["out"] == {at: ("ab"[n // size], n % size) for at, n in enumerate(truth)}
    assert elements(probe_converter(convert, sources))["out"] == elements(layout)["out"]


def _bf16(*shape: int) -> dict[str, torch.Tensor]:
    return {"w": torch.empty(shape, dtype=torch.bfloat16, device="meta")}


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w + 1,
        lambda w: (w / (w.float().abs().max() / 448)).to(torch.float8_e4m3fn),
        lambda w: w.mean(0),
        lambda w: w.clone().mul_(2),
        lambda w: torch.cat([w, w * 0.5]),
    ],
)
def test_arithmetic_is_refused_by_tracing_and_by_probing(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(UntraceableError):
        learn_converter(lambda state: {"out": make(state["w"])}, _bf16(16, 8))


def test_an_untraceable_tensor_is_named_with_its_operation_and_sources() -> None:
    sources = {**_bf16(4, 4), "v": torch.empty(4, device="meta")}
    layout, refused = trace_converter(lambda state: {"out": state["w"].flip(0).t(), "v": state["v"].clone()}, sources)
    assert refused["out"].operation == "aten.flip.default"
    assert refused["out"].sources == {"w"}
    assert set(layout.by_tensor) == {"v"}


@pytest.mark.parametrize(
    "move",
    [
        lambda w: w.flip(0),
        lambda w: w.index_select(0, torch.arange(w.shape[0] - 1, -1, -1, device=w.device)),
        lambda w: w[torch.tensor([3, 1, 1])],
        lambda w: w.roll(3, 1),
        lambda w: torch.nn.functional.pad(w, (0, 0, 0, 2)),
    ],
)
def test_what_cannot_be_traced_is_probed_and_the_rest_is_not(move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    seen: list[tuple[str, str]] = []

    def convert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.extend((name, tensor.device.type) for name, tensor in state.items())
        return {"moved": move(state["w"]), "plain": state["v"].t().contiguous()}

    sources = {**_bf16(8, 6), "v": torch.empty(50, 3, device="meta")}
    layout = learn_converter(convert, sources)
    truth = move(torch.arange(1, 49).view(8, 6)).reshape(-1).tolist()
    assert elements(layout)["moved"] == {at: ("w", n - 1) for at, n in enumerate(truth) if n}
    assert len(elements(layout)["plain"]) == 150
    assert ("w", "cpu") in seen
    assert ("v", "cpu") not in seen


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_a_converter_that_insists_on_its_dtype_is_probed_in_digits(dtype: torch.dtype) -> None:
    def convert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if state["w"].dtype != dtype:
            raise TypeError("wrong dtype")
        return {"out": state["w"].view(30, 2, 10).transpose(1, 2).contiguous().to(torch.bfloat16)}

    layout = probe_converter(convert, {"w": torch.empty(600, dtype=dtype, device="meta")})
    truth = torch.arange(600).view(30, 2, 10).transpose(1, 2).reshape(-1).tolist()
    assert elements(layout)["out"] == {at: ("w", n) for at, n in enumerate(truth)}
    assert {item.casts for item in layout.placements} == {() if dtype == torch.bfloat16 else ("BF16",)}


def test_casts_are_recorded_in_order() -> None:
    sources = {"w": torch.empty(4, 6, device="meta")}
    layout, _ = trace_converter(
        lambda state: {"out": state["w"].half().t().to(torch.bfloat16), "raw": state["w"]}, sources
    )
    assert {(item.tensor, item.casts) for item in layout.placements} == {("out", ("F16", "BF16")), ("raw", ())}
    values = torch.randn(24)
    (out,) = layout.by_tensor["out"]
    assert torch.equal(take(out, values), values.half().to(torch.bfloat16).view(4, 6).t())


def test_elements_that_come_from_nowhere_are_holes() -> None:
    def padded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = state["w"].new_zeros(6, 4)
        out[:4] = state["w"]
        out[1].copy_(torch.ones(4))
        return {"out": out, "constant": torch.ones(2)}

    layout, _ = trace_converter(padded, _bf16(4, 4))
    assert sorted(elements(layout)["out"]) == [*range(4), *range(8, 16)]
    assert "constant" not in layout.by_tensor


def test_writing_into_an_input_is_refused() -> None:
    def convert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state["w"][0].copy_(state["w"][1])
        return state

    with pytest.raises(UntraceableError, match="changes"):
        trace_converter(convert, _bf16(2, 2))


def test_a_bit_view_is_not_taken_for_a_cast() -> None:
    with pytest.raises(UntraceableError, match="reinterprets"):
        trace_converter(lambda state: {"out": state["w"].view(torch.int16)}, _bf16(2, 2))
    _, refused = trace_converter(lambda state: {"out": state["w"].clone().view(torch.int16)}, _bf16(2, 2))
    assert set(refused) == {"out"}


def test_interleaved_qkv_of_a_large_model_takes_one_box_each() -> None:
    groups, per, dim, hidden = 8, 5, 128, 5120

    def split(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        qkv = state["w"].view(groups, per + 2, dim, hidden)
        q, k, v = qkv.split([per, 1, 1], 1)
        return {name: part.reshape(-1, hidden) for name, part in (("q", q), ("k", k), ("v", v))}

    layout, _ = trace_converter(split, _bf16(groups * (per + 2) * dim, hidden))
    assert len(layout.placements) == 3
