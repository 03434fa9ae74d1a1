"""Claims about ranks that publish together: each its own shards, one answer for all, and no rank left waiting.

Owns real torch.distributed jobs of two and three processes over gloo. What they publish is compared, bit for bit, with
the whole tensors, by a replica that knows nothing of ranks.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loop import Child, checkpoint, config, digest_of, follow_fresh, model, reader, same_bits, versions
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from weight_sync import Publisher
from weight_sync.config import Config
from weight_sync.errors import StoreUnavailableError
from weight_sync.group import TorchGroup
from weight_sync.transport.file import FilePublisherEnd

Say = Callable[[str], None]


def launch(
    folder: Path, world: int, target: Callable[..., None], *args: Any, crash: dict[int, str] | None = None
) -> list[Child]:
    """Starts a job; ``crash`` maps ranks to the step at which they kill themselves."""
    meeting = tempfile.mktemp(dir=folder)
    return [
        Child(folder, _rank, meeting, rank, world, target, *args, crash_at=(crash or {}).get(rank, ""))
        for rank in range(world)
    ]


def finished(ranks: Sequence[Child]) -> list[list[str]]:
    """What each rank said; all must have ended well."""
    codes = [rank.wait() for rank in ranks]
    said = [rank.lines() for rank in ranks]
    assert codes == [0] * len(ranks), said
    return said


def _rank(say: Say, meeting: str, rank: int, world: int, target: Callable[..., None], *args: Any) -> None:
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        target(say, *args)
    except BaseException as error:
        say(f"died of {type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)  # a job whose rank was killed cannot be taken down in good order


class Counting(TorchGroup):
    """Counts the bytes that cross the ranks' group."""

    moved = 0

    def gather(self, data: bytes) -> list[bytes]:
        self.moved += len(data)
        return super().gather(data)

    def broadcast(self, data: bytes | None) -> bytes:
        answer = super().broadcast(data)
        self.moved += len(answer)
        return answer


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("a rank gathered a tensor")


# --- shards of the caller ---


def whole(step: int) -> dict[str, torch.Tensor]:
    """The small model, and a tensor that is too large to cross the group unseen."""
    big = torch.arange(300 * 1000, dtype=torch.int32).reshape(300, 1000)
    big[:: 7 + step] += step
    return {**model(step), "big": big}


def shards(step: int, stage: bool) -> dict[str, torch.Tensor]:
    """This rank's part: sharded by rows or columns, replicated, or (``stage``) on one rank alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    out: dict[str, torch.Tensor] = {}
    for k, (name, tensor) in enumerate(whole(step).items()):
        if tensor.ndim > 1 and tensor.numel():
            out[name] = distribute_tensor(tensor, mesh, [Shard(k % 2)], src_data_rank=None)
        elif stage and name in ("lm_head", "flags"):
            if dist.get_rank() == (k % dist.get_world_size()):
                out[name] = tensor
        elif k % 2:
            out[name] = distribute_tensor(tensor, mesh, [Replicate()], src_data_rank=None)
        else:
            out[name] = tensor
    return out


def publish_shards(say: Say, keys: Config, steps: Sequence[int], stage: bool) -> None:
    group = Counting(timeout_s=keys.timeout_s)
    DTensor.full_tensor = DTensor.redistribute = forbidden  # type: ignore[assignment,method-assign]
    with Publisher.open(keys, group=group) as publisher:
        for step in steps:
            report = publisher.publish(shards(step, stage), step=step)
            assert report is not None
            say(f"{report.version} {report.kind} {report.digest} {report.changed} {publisher.version} {publisher.step}")
    assert group.moved < 60_000, f"{group.moved} bytes crossed the group, the largest tensor has 1,200,000"


@pytest.mark.parametrize(("world", "stage"), [(2, False), (3, True)])
def test_ranks_publish_their_own_shards_and_none_gathers_the_model(tmp_path: Path, world: int, stage: bool) -> None:
    keys = config(tmp_path, anchor_every=3)
    said = finished(launch(tmp_path, world, publish_shards, keys, [1, 2], stage))
    said += finished(launch(tmp_path, world, publish_shards, keys, [3, 4, 5], stage))  # restarted: a new epoch
    for lines in (said[:world], said[world:]):
        assert all(other == lines[0] for other in lines)
    lines = said[0] + said[world]
    assert [line.split()[2] for line in lines] == [digest_of(whole(step)) for step in range(1, 6)]
    assert [line.split()[1] for line in lines].count("ANCHOR") == 2
    assert same_bits(follow_fresh(keys)[0], whole(5))
    ranks = {ref.rank for number in versions(keys) for ref in reader(keys).manifest(number).views[0].shards}
    assert ranks == set(range(world))


def test_a_job_of_another_size_continues_the_run(tmp_path: Path) -> None:
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")))

    def parts(step: int) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in whole(step).items() if name != "big"}

    finished(launch(tmp_path, 3, publish_small, keys, [1, 2]))
    with Publisher.open(keys) as alone:
        alone.publish(parts(3), step=3)
    finished(launch(tmp_path, 2, publish_small, keys, [4]))
    assert same_bits(follow_fresh(keys)[0], parts(4))


def publish_behind(say: Say, keys: Config) -> None:
    """The next step's collectives of the host run while a version is on its way."""
    with Publisher.open(keys) as publisher:
        for step in (1, 2, 3):
            assert publisher.publish(shards(step, True), step=step) is None
            total = torch.ones(1000)
            dist.all_reduce(total)
            assert total.eq(dist.get_world_size()).all()
        report = publisher.settle()
        assert report is not None
        say(f"{report.version} {report.digest}")


def test_versions_on_their_way_do_not_meet_the_hosts_own_collectives(tmp_path: Path) -> None:
    keys = config(tmp_path, overlap=True)
    said = finished(launch(tmp_path, 2, publish_behind, keys))
    assert said == [[f"2 {digest_of(whole(3))}"]] * 2
    assert same_bits(follow_fresh(keys)[0], whole(3))


def publish_small(say: Say, keys: Config, steps: Sequence[int]) -> None:
    with Publisher.open(keys) as publisher:
        for step in steps:
            mine = shards(step, True)
            del mine["big"]
            publisher.publish(mine, step=step)


# --- modules ---


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(33, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 33, bias=False)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.head(self.norm(x)) * self.scale
        return out


def train_sharded(say: Say, keys: Config, out: str) -> None:
    """Three real steps of a model under FSDP2; rank 0 keeps the whole states for the comparison."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = Net()
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    with Publisher.open(keys) as publisher:
        for step in (1, 2, 3):
            net(torch.arange(33).reshape(3, 11) % (7 + dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report = publisher.publish(net, step=step)
            assert report is not None
            say(f"{report.version} {report.digest} {report.changed}")
            state = {k: (v.full_tensor() if isinstance(v, DTensor) else v) for k, v in net.state_dict().items()}
            if dist.get_rank() == 0:
                save_file({k: v.contiguous() for k, v in state.items()}, f"{out}/{step}.safetensors")


@pytest.mark.parametrize("based", [False, True])
def test_a_model_under_fsdp2_is_followed_bit_for_bit(tmp_path: Path, based: bool) -> None:
    base = None
    if based:  # served in bf16, trained in fp32
        (tmp_path / "base").mkdir()
        torch.manual_seed(0)
        state = {k: v if k == "scale" else v.bfloat16() for k, v in Net().state_dict().items()}
        save_file(state, tmp_path / "base" / "model.safetensors")
        base = str(tmp_path / "base")
    keys = config(tmp_path, base=base)
    said = finished(launch(tmp_path, 2, train_sharded, keys, str(tmp_path)))
    assert said[0] == said[1] and len(said[0]) == 3
    for line, step in zip(said[0], (1, 2, 3), strict=True):
        expected = load_file(tmp_path / f"{step}.safetensors")
        if based:
            expected = {k: v if k == "scale" else v.bfloat16() for k, v in expected.items()}
        assert line.split()[1] == digest_of(expected)
    assert same_bits(follow_fresh(keys)[0], expected)


# --- a rank that fails ---


def outcome(call: Callable[[], Any]) -> str:
    try:
        return f"version {call().version}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fail_in_turn(say: Say, keys: Config) -> None:
    """One fault after the other, each on rank 1 or between the ranks, with a publish that works after each."""
    mine = dist.get_rank() == 1
    put = FilePublisherEnd.put_shard
    with Publisher.open(keys) as publisher:

        def good(step: int) -> None:
            say(outcome(lambda: publisher.publish(shards(step, False), step=step)))

        def bad(change: Callable[[dict[str, torch.Tensor]], Any], step: int = 90) -> None:
            tensors = shards(8, False)
            change(tensors)
            say(outcome(lambda: publisher.publish(tensors, step=step)))

        good(1)
        bad(lambda t: t.update(extra=torch.zeros(2, dtype=torch.complex128)) if mine else None)
        good(2)
        bad(lambda t: t.update(extra=torch.zeros(2 + mine)))  # another shape on each rank
        good(3)
        bad(lambda t: t.update(extra=torch.zeros(3, device="meta")) if mine else None)
        bad(lambda t: None, step=0 if mine else 90)
        good(4)
        bad(lambda t: t.update(big=t["big"].to_local()) if mine else None)
        good(5)
        prepare = publisher._views.prepare
        if mine:
            publisher._views.prepare = _raise(MemoryError("no room"))  # type: ignore[method-assign]
        good(60)
        publisher._views.prepare = prepare  # type: ignore[method-assign]
        good(6)
        if mine:
            FilePublisherEnd.put_shard = _raise(StoreUnavailableError("gone", field="disk"))  # type: ignore[method-assign]
        good(70)
        FilePublisherEnd.put_shard = put  # type: ignore[method-assign]
        good(7)


def _raise(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def test_one_rank_that_fails_fails_the_round_on_all_and_the_next_one_works(tmp_path: Path) -> None:
    keys = config(tmp_path)
    zero, one = finished(launch(tmp_path, 2, fail_in_turn, keys))
    expected = [
        *("version 0", "TensorError", "version 1", "TensorError", "version 2", "TensorError", "ForkRequiredError"),
        *("version 3", "TensorError", "version 4", "MemoryError", "version 5", "StoreUnavailableError", "version 6"),
    ]
    for k, (a, b) in enumerate(zip(zero, one, strict=True)):
        if expected[k] == "MemoryError":  # no class of ours: elsewhere it is told by name
            assert (a, b) == ("WeightSyncError: rank 1: MemoryError: no room", "MemoryError: no room")
        else:
            assert (a.split(":")[0], b.split(":")[0]) == (expected[k], expected[k])
    assert "rank 1: " in zero[1] and "complex128" in zero[1] and "'extra'" not in zero[1] and "extra" in zero[1]
    assert same_bits(follow_fresh(keys)[0], whole(7))


def publish_until_a_rank_dies(say: Say, keys: Config) -> None:
    with Publisher.open(keys) as publisher:
        for step in (1, 2, 3):
            say(outcome(lambda s=step: publisher.publish(shards(s, True), step=s)))  # type: ignore[misc]


AT_RANK_0 = ["publish:encoded", "put_shard:after", "publish:sent", "publish:commit", "commit:before", "commit:after",
             "publish:promoted"]  # fmt: skip
AT_RANK_1 = ["publish:encoded", "put_shard:before", "publish:sent", "publish:promoted"]


@pytest.mark.parametrize(("dies", "step"), [*((0, step) for step in AT_RANK_0), *((1, step) for step in AT_RANK_1)])
def test_a_rank_killed_at_any_step_is_told_to_the_others_and_a_restart_goes_on(
    tmp_path: Path, dies: int, step: str
) -> None:
    keys = config(tmp_path, timeout_s=20)
    ranks = launch(tmp_path, 2, publish_until_a_rank_dies, keys, crash={dies: f"{step}#2"})
    assert ranks[dies].wait() == -signal.SIGKILL
    assert ranks[1 - dies].wait() == 0, ranks[1 - dies].lines()
    promoted = step == "publish:promoted"
    told = ranks[1 - dies].lines()
    assert told[: 1 + promoted] == [f"version {k}" for k in range(1 + promoted)]
    assert all(line.startswith("DeadlineError: a rank did not take part") for line in told[1 + promoted :])
    assert len(told) == 3
    committed = 2 if promoted or step == "commit:after" else 1
    assert versions(keys) == list(range(committed))
    assert same_bits(follow_fresh(keys)[0], whole(committed))
    finished(launch(tmp_path, 2, publish_shards, keys, [3, 4], True))
    assert same_bits(follow_fresh(keys)[0], whole(4))


def stop_before_the_second(say: Say, keys: Config) -> None:
    with Publisher.open(keys) as publisher:
        for step in (1, 2):
            if step == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            say(outcome(lambda s=step: publisher.publish(shards(s, False), step=s)))  # type: ignore[misc]


def test_a_rank_that_hangs_ends_the_wait_of_the_others_at_its_limit(tmp_path: Path) -> None:
    keys = config(tmp_path, timeout_s=2)
    ranks = launch(tmp_path, 2, stop_before_the_second, keys)
    assert ranks[0].wait() == 0
    ranks[1].kill()
    assert ranks[0].lines()[0] == "version 0" and ranks[0].lines()[1].startswith(
        "DeadlineError: a rank did not take part"
    )
    assert versions(keys) == [0]
