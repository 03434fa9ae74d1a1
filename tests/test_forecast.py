"""Claims about the forecast of densities: against the formula, against rounding itself, against recorded training steps.

Owns no claim about real models.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_cases import ask, run
from safetensors.torch import save_file

from weight_sync.bench.traces import find_recorded, recorded
from weight_sync.checkpoint import Checkpoint
from weight_sync.errors import InputError
from weight_sync.forecast import FORMATS, OPTIMIZERS, expected_density, forecast


def saved(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("push", [1e-6, 1e-4, 1e-2, 1.0])
def test_the_closed_form_is_the_mean_over_updates(push: float) -> None:
    ulps = np.exp2(np.arange(-12, -2, dtype=np.float64))
    updates = np.abs(np.random.default_rng(0).standard_normal((400_000, 1))) * push
    drawn = np.minimum(1, updates / ulps).mean()
    assert expected_density(ulps, push) == pytest.approx(drawn, rel=0.02)


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_it_predicts_how_often_rounding_moves(tmp_path: Path, format: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[format]
    dice = torch.Generator().manual_seed(1)
    master = (torch.randn(512, 512, generator=dice) * 0.02).double()
    update = torch.randn(512, 512, generator=dice).double() * 0.25
    before, after = master.to(dtype), (master + 1e-5 * update).to(dtype)
    changed = float((before != after).double().mean())
    (found,) = forecast(Checkpoint(saved(tmp_path / "c", weight=before)), 1e-5, format, 0.25)
    assert found.density == pytest.approx(changed, rel=0.05)
    assert found.floors.sum() == pytest.approx(512 * 512)


def test_it_is_near_recorded_training_steps(tmp_path: Path) -> None:
    path = find_recorded()
    assert path is not None
    steps = {trace.name: trace for trace in recorded(path)}
    trace = steps["recorded-lr1e-5-3"]
    tensors = {t.spec.name: torch.from_numpy(t.old.view(np.int16).copy()).view(torch.bfloat16).reshape(t.spec.shape)
               for t in trace.tensors}  # fmt: skip
    found = list(forecast(Checkpoint(saved(tmp_path / "c", **tensors)), 1e-5, "bf16", OPTIMIZERS["adam"]))
    predicted = sum(one.density * one.spec.elements for one in found) / trace.elements
    assert predicted == pytest.approx(trace.density, rel=0.35), (
        "the RMS of this step is not known, that of late ones is"
    )


def test_coarser_formats_change_less_and_scales_bound_them(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", a=torch.randn(256, 256).bfloat16() * 0.02, norm=torch.ones(256).bfloat16())
    density = {}
    for name in FORMATS:
        found = {one.spec.name: one for one in forecast(Checkpoint(folder), 1e-5, name, 0.25)}
        density[name] = found["a"].density
        assert found["norm"].format == ("bf16" if FORMATS[name].largest else name)
    assert density["fp32"] > density["fp16"] > density["bf16"] > density["fp8"] > density["mxfp4"] > density["int4"] > 0


def test_the_command_compares_with_a_run_and_draws(tmp_path: Path) -> None:
    folders = [saved(tmp_path / f"c{k}", weight=(torch.arange(4096.0) / 4096 + k * 1e-3).bfloat16()) for k in range(3)]
    run("publish", *folders, "--to", tmp_path / "run")
    picture = tmp_path / "floor.png"
    words = ("forecast", folders[0], "--lr", "1e-3", "--optimizer", "muon")
    found = ask(*words, "--measured", tmp_path / "run", "--plot", picture)
    assert found["measured"]["versions"] == [1, 2] or len(found["measured"]["versions"]) == 2
    assert 0 < found["measured"]["density"] <= 1 and 0 < found["density"] <= 1 and found["rms"] == OPTIMIZERS["muon"]
    assert picture.stat().st_size > 1000
    assert "forecast" in run(*words).stdout
    for wrong in (("--format", "fp3"), ("--optimizer", "sgd"), ("--lr", "0"), ("--rms", "nan")):
        assert json.loads(run("forecast", folders[0], *wrong, "--json", code=2).stdout)["error"]
    with pytest.raises(InputError):
        list(forecast(Checkpoint(folders[0]), -1.0, "bf16", 0.25))
