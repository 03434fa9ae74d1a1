"""Claims about quantised views: every byte is what the format's library makes of the trainer's weights, wherever they
are sharded; what does not fit is refused before anything is served.

Owns no claim about several views (test_views.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror_cases import assert_holds, history_of
from quantize_cases import CASES, FP8, LINEAR, Case, masters, plain

from weight_sync.errors import ConfigError, LayoutError, TensorError
from weight_sync.mirror import materialize
from weight_sync.publisher import Publisher
from weight_sync.replica import Replica
from weight_sync.testing import MemoryEngine, check_quantizer


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_five_steps_equal_full_checkpoints_by_the_formats_library(case: Case, tmp_path: Path) -> None:
    base, store = case.write_base(tmp_path / "base"), tmp_path / "run"
    engine = MemoryEngine(base)
    with (
        Publisher.open(str(store), base=os.fspath(base), anchor_every=3, forms=("step", "compact")) as publisher,
        Replica.open(str(store), engine) as replica,
    ):
        for step in range(1, 6):
            report = publisher.publish(masters(step), step)
            assert report is not None and report.views["default"].scheme == case.scheme
            assert report.changed < report.elements / 2
            assert replica.sync().digest == report.digest
            out = tmp_path / f"v{step}"
            materialize(history_of(store, base), report.version, out)
            assert_holds(out, case.checkpoint(step))
            assert_holds_engine(engine, case.checkpoint(step))
    with Publisher.open(str(store), base=os.fspath(base)) as again:  # a trainer that restarts proves the head anew
        assert again.recognise(masters(5)) == again.version


@pytest.mark.parametrize("case", ["fp8-block", "int4-group", "nvfp4"])
def test_the_schemes_pass_their_own_conformance_suite(case: str, tmp_path: Path) -> None:
    base = CASES[case].write_base(tmp_path / "base")
    check_quantizer(base, plain(0))
    with pytest.raises(AssertionError, match=LINEAR[2]):
        check_quantizer(base, plain(0) | {LINEAR[2]: plain(2)[LINEAR[2]]})


def assert_holds_engine(engine: MemoryEngine, tensors: dict[str, torch.Tensor]) -> None:
    assert set(engine.table) == set(tensors)
    for name, tensor in tensors.items():
        assert engine.table[name][1].tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name


def test_codes_and_scales_of_a_failed_publish_come_with_the_next(tmp_path: Path) -> None:
    base, store = FP8.write_base(tmp_path / "base"), tmp_path / "run"
    with Publisher.open(str(store), base=os.fspath(base)) as publisher:
        bad = masters(1)
        bad[LINEAR[1]][3, 5] = float("nan")
        for value in (float("nan"), float("inf")):
            bad[LINEAR[1]][3, 5] = value
            with pytest.raises(TensorError, match=rf"(?s)NaN or infinity.*{LINEAR[1]}"):
                publisher.publish(bad, 1)
        assert publisher.version == 0
        report = publisher.publish(masters(2), 2)
        assert report is not None
        materialize(history_of(store, base), report.version, tmp_path / "out")
        assert_holds(tmp_path / "out", FP8.checkpoint(2))


SCALE = LINEAR[0].removesuffix("weight") + "weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda t: t.pop(SCALE), TensorError, rf"(?s)lacks its scales.*{SCALE}"),
        (lambda t: t.update({SCALE: torch.ones(3, 1)}), TensorError, rf"(?s)do not fit.*{SCALE}.*2 x 1"),
        (lambda t: t.update({SCALE: t[SCALE].half()}), TensorError, r"(?s)not a scale of this scheme.*F16"),
        *((lambda t, v=v: t[SCALE].fill_(v), TensorError, rf"(?s)scale is 0, infinite or NaN.*{SCALE}.*{v}")
          for v in (0.0, float("inf"), float("nan"))),
    ],
)  # fmt: skip
def test_a_base_that_does_not_fit_its_scheme_is_refused_and_opens_no_run(
    tmp_path: Path, change: Any, error: type[Exception], match: str
) -> None:
    base = FP8.write_base(tmp_path / "base", change)
    with pytest.raises(error, match=match):
        Publisher.open(str(tmp_path / "run"), base=os.fspath(base))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("case", "config", "match"),
    [
        ("fp8-block", {"quant_method": "gptq"}, r"(?s)no quantiser for this scheme.*gptq.*compressed-tensors"),
        ("fp8-block", {"quant_method": None}, "does not say how it is quantised"),
        ("fp8-block", {"weight_block_size": [128]}, "not a block size"),
        ("fp8-block", {"fmt": "e5m2"}, "fp8 of another kind"),
        ("fp8-block", {"weight_block_size": [100, 128]}, r"(?s)scales do not fit.*2 x 3"),
        ("int4-group", {"format": "sparse-24"}, r"(?s)a format that is not known.*sparse-24"),
        ("int4-group", {"config_groups": {}}, "does not say how it is quantised"),
        ("int4-group", {"config_groups": {"g": {"targets": ["re:none.*"], "weights": {"num_bits": 4, "type": "int",
         "strategy": "group", "group_size": 32}}}}, r"(?s)no group.*layers.0.mlp"),
        ("int4-group", {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int",
         "strategy": "group", "group_size": 48}}}}, r"(?s)groups do not divide.*128 columns.*48"),
    ],
)  # fmt: skip
def test_a_scheme_that_is_not_known_or_does_not_divide_is_refused(
    tmp_path: Path, case: str, config: Any, match: str
) -> None:
    base = CASES[case].write_base(tmp_path / "base", **config)
    with pytest.raises((ConfigError, TensorError), match=match):
        Publisher.open(str(tmp_path / "run"), base=os.fspath(base))
    assert not (tmp_path / "run").exists()


def test_a_trainer_with_other_tensors_than_the_base_was_made_from_is_told_which(tmp_path: Path) -> None:
    base = FP8.write_base(tmp_path / "base")
    with Publisher.open(str(tmp_path / "run"), base=os.fspath(base)) as publisher:
        head = publisher.version
        for change in ({LINEAR[0]: torch.zeros(256, 64)}, {"more.weight": torch.zeros(2, 2)}, FP8.checkpoint(1)):
            with pytest.raises((LayoutError, TensorError)):
                publisher.publish({**masters(1), **change}, 1)
        fewer = {name: tensor for name, tensor in masters(1).items() if name != LINEAR[1]}
        with pytest.raises(LayoutError, match=rf"(?s){LINEAR[1]}"):
            publisher.publish(fewer, 1)
        assert publisher.version == head and publisher.publish(masters(1), 1) is not None


def test_a_base_that_is_quantised_already_is_published_as_it_is_when_told_so(tmp_path: Path) -> None:
    base, store = FP8.write_base(tmp_path / "base"), tmp_path / "run"
    with Publisher.open(str(store), base=os.fspath(base), scheme="cast") as publisher:
        report = publisher.publish(FP8.checkpoint(1), 1)
        assert report is not None and report.views["default"].scheme == "cast"
        materialize(history_of(store, base), report.version, tmp_path / "out")
        assert_holds(tmp_path / "out", FP8.checkpoint(1))


def test_importing_weight_sync_and_a_cast_view_import_no_library_of_a_format() -> None:
    code = "import sys, weight_sync, weight_sync.publisher, weight_sync.quantize.fp8, weight_sync.quantize.compressed\n"
    code += "print([name for name in ('compressed_tensors', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]", done.stdout
