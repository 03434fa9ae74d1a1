"""Claims about the RDMA transport between real processes: every element arrives right, under the digest, however trainer
and engine split the model.

Owns jobs of trainer and engine processes over UCX's TCP and shared memory. The model has dense, fused and expert weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from loop import Child
from rdma_cases import free_port, keys, serve, trainers

from weight_sync.config import Config
from weight_sync.ports import PublisherEnd, ReplicaEnd, Transport
from weight_sync.testing import check_transport, transport_claims
from weight_sync.transport.rdma import RdmaPublisherEnd, RdmaReplicaEnd, RdmaTransport

pytest.importorskip("nixl_cu12")
STEPS = 3


@pytest.mark.parametrize(("world", "commit"), [(1, "shadow"), (2, "shadow"), (2, "direct"), (4, "shadow")])
def test_fsdp_ranks_fill_tensor_parallel_engines_bit_for_bit(tmp_path: Path, world: int, commit: str) -> None:
    given = keys(free_port(), rdma={"commit": commit, "chunk_bytes": 4096, "gather_bytes": 512})
    ranks = trainers(tmp_path, given, world, STEPS, 2)
    engines = [Child(tmp_path, serve, given, f"tp{tp}", tp, STEPS) for tp in (1, 2)]
    for tp, engine in zip((1, 2), engines, strict=True):
        assert engine.wait() == 0, engine.lines()
        lines = [line.split()[:3] for line in engine.lines()]
        assert lines == [[f"tp{tp}", str(step), "True"] for step in range(STEPS)], engine.lines()
        how = "landing" if commit == "shadow" else "straight into place"
        assert all(how in line for line in engine.lines())
    for rank in ranks:
        assert rank.wait() == 0, rank.lines()


class _Through(Transport):
    """Readers that go through the controller of the publisher that opened a run last."""

    def __init__(self, config: Config) -> None:
        self._config, self._rdma = config, RdmaTransport(config)
        self._ends: list[RdmaPublisherEnd] = []

    def publisher_end(self, rank: int, world_size: int) -> PublisherEnd:
        self._ends.append(self._rdma.publisher_end(rank, world_size))
        return self._ends[-1]

    def replica_end(self, run_id: str | None = None) -> ReplicaEnd:
        ports = [end.port for end in self._ends if end.port]
        if not ports:
            self._rdma.publisher_end(0, 1)  # rank 0, which reads its own log
            return self._rdma.replica_end(run_id)
        return RdmaReplicaEnd(self._config.replace(uri=f"rdma://127.0.0.1:{ports[-1]}"), run_id)


@pytest.mark.parametrize("claim", transport_claims())
def test_with_a_store_the_transport_keeps_every_promise_of_the_port(tmp_path: Path, claim: str) -> None:
    def make() -> Transport:
        return _Through(
            Config(uri="rdma://127.0.0.1:0", store=str(tmp_path), poll_s=0.02, timeout_s=30, keep_versions=2)
        )

    assert check_transport(make, only=[claim]) == [claim]
