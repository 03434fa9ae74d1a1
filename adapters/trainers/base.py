"""TrainerHost: what the adapters of all hosts share between a host's sync point and the publisher.

Owns the order of one sync, what happens to its errors, the metrics that the host gets, and the first sync after a
restart. Owns no weight and no name (the host's adapter has them), no diff and no wire (weight_sync.publisher).

One sync, on every rank: the version in flight is settled; the host's weights are diffed and encoded, during which
training waits; the upload goes on behind the next step (``overlap``), unless the block asks to wait for the commit
(``overlap: false``) or for replicas (``wait_acks``).
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from weight_sync.adapters.engines.switches import switch_torch
from weight_sync.adapters.trainers.metrics import PREFIX, fleet_metrics, publish_metrics
from weight_sync.config import Config
from weight_sync.consensus import together
from weight_sync.contract import MismatchMonitor, process_contract
from weight_sync.errors import ConfigError, ForkRequiredError, LineageError, WeightSyncError
from weight_sync.ports import Group
from weight_sync.proto.v1 import contract_pb2
from weight_sync.publisher import Publisher
from weight_sync.reports import PublishReport

if TYPE_CHECKING:
    from weight_sync.adapting import Offered

__all__ = ["SHARD", "TrainerHost", "check_profile", "must_stop"]

SHARD = "shard"
_LISTED = 20  # tensors that a log line names


def must_stop(error: WeightSyncError, attached: bool) -> str:
    """Why the host must stop over an error of a sync; "" when it may train on, with engines at the version before.

    Args:
        attached: whether a sync has succeeded before: until then names, shapes, configuration and store are unproven.
    """
    if isinstance(error, LineageError):
        return "this trainer does not own the run's future any more"
    return "" if attached else "the first sync failed"


def check_profile(profile: str) -> None:
    """Raises ConfigError for a profile that a host with a forward pass of its own cannot have."""
    if profile == "unified":
        raise ConfigError("this host computes by its own model code, not by the engine's", field="contract.profile",
                          found=profile, expected="native or deterministic",
                          do="train through weight_sync.adapters.engines.unified.Unified")  # fmt: skip


class TrainerHost(ABC):
    """One rank of a host's training job; implements ``weight_sync.ports.TrainerAdapter``.

    Args:
        config: the keys in force.
        group: the ranks that publish together.

    Attributes:
        paths: by name of a served tensor, how this rank came by it; filled by `source`. `SHARD` is where it lies.
        monitor: of rollout logprobs against the trainer's own; what it is shown is part of the metrics of the next sync.
    """

    host = "trainer"

    def __init__(self, config: Config, group: Group) -> None:
        check_profile(config.contract.profile)
        switch_torch(config.contract.profile)
        self.config = config
        self.monitor = MismatchMonitor(config.contract.bound, config.contract.outlier)
        self.paths: dict[str, str] = {}
        self.log = logging.getLogger(f"weight_sync.{self.host}")
        self._group = group
        self._publisher: Publisher | None = None
        self._attached = False
        self._failures = 0
        self._last: PublishReport | None = None
        self._waited: dict[str, float] = {}

    # --- the port ---

    @abstractmethod
    def source(self) -> Offered:
        """This rank's part of the served view as it is now; may use the host's own collectives."""

    def group(self) -> Group:
        """The ranks that publish together."""
        return self._group

    def execution(self) -> dict[str, Any]:
        """Fields of the contract that this host knows of itself, by name; ``model`` is a module to ask for the rest."""
        return {}

    def contract(self) -> contract_pb2.ExecutionContract:
        """How this trainer computes; travels with every version."""
        known = {name: value for name, value in self.execution().items() if value not in (None, "")}
        return process_contract(**{"engine": self.host, **known})

    # --- what host adapters call ---

    @property
    def publisher(self) -> Publisher:
        """Opened at the first use, by all ranks together. Raises as `Publisher.open`."""
        if self._publisher is None:
            self._publisher = Publisher.open(self.config, group=self._group, execution=self.contract())
            self.log.info("publishing run %s to %s", self._publisher.run_id, self.config.uri)
        return self._publisher

    @property
    def version(self) -> int | None:
        """The version in flight, else the one committed last; None before the first."""
        if self._publisher is None:
            return None
        return self._publisher.version if self._publisher.pending is None else self._publisher.pending

    def sync(self, step: int | None, metadata: Mapping[str, str] | None = None) -> dict[str, float]:
        """Publishes what the host holds now. Called at the host's sync point, on every rank.

        Args:
            step: the host's own counter; grows from sync to sync.
            metadata: free text that travels with the version.

        Returns metrics, the same on every rank but for times; those of the fleet are as at the begin of the call unless
        replicas are waited for. ``weight_sync/failed`` is 1 when this sync, or the version that was in flight, failed:
        the host trains on, engines keep what they serve, and what has changed is part of the next version. Raises what
        `must_stop` says.
        """
        begun = time.perf_counter()
        errors = [self._try(self._settle)]
        fleet = self._fleet()
        errors.append(self._try(lambda: self._publish(step, metadata)))
        failed = sum(error is not None for error in errors)
        self._failures += failed
        out = {
            PREFIX + "failed": float(failed > 0),
            PREFIX + "failures": float(self._failures),
            PREFIX + "tensors_gathered": float(sum(path != SHARD for path in self.paths.values())),
            PREFIX + "seconds_blocked": time.perf_counter() - begun,
        }
        if self._last is not None:
            out |= publish_metrics(self._last)
        return out | fleet | self._waited | self.monitor.metrics()

    def settle(self) -> bool:
        """Waits for the version in flight; False when it failed, which is logged and counted."""
        error = self._try(self._settle)
        self._failures += error is not None
        return error is None

    def close(self) -> None:
        """Settles the version in flight and releases everything. Raises its error."""
        if self._publisher is not None:
            self._publisher.close()

    # --- one sync ---

    def _try(self, step: Callable[[], None]) -> WeightSyncError | None:
        """The error of a step that may pass. Raises one that may not."""
        try:
            step()
        except WeightSyncError as error:
            reason = must_stop(error, self._attached)
            if reason:
                self.log.error("%s: %s", reason, error)
                raise
            self.log.error("sync failed, engines keep the version before: %s", error)
            return error
        return None

    def _settle(self) -> None:
        if self._publisher is not None:
            self._last = self._publisher.settle() or self._last

    def _publish(self, step: int | None, metadata: Mapping[str, str] | None) -> None:
        publisher = self.publisher
        source = self._offered()
        if not self._attached and self._holds_head(publisher, source, step):
            self._attached = True
            return
        report = publisher.publish(source, step=step, metadata=metadata)
        if not self._attached:
            self._attached = True
            self._tell_paths()
        if report is not None:
            self._last = report
        if self.config.wait_acks:
            self._settle()
            self._wait_for(publisher, self.config.wait_acks)

    def _offered(self) -> Offered:
        """This rank's source; when making it fails on one rank, all raise and none waits for it."""
        made: list[Offered] = []

        def make() -> bytes:
            made.append(self.source())
            return b""

        together(self._group, make, lambda _: b"")
        return made[0]

    def _holds_head(self, publisher: Publisher, source: Offered, step: int | None) -> bool:
        """After a restart: whether the host's checkpoint is the run's head, so that there is nothing to publish.

        Raises ForkRequiredError, saying which version it is, when the run has gone on since that checkpoint.
        """
        head = publisher.step
        if head is None or step is None or step > head:
            return False
        number = publisher.recognise(source)
        if number is not None and number == publisher.version:
            self.log.info("resumed at version %d, the head of run %s", number, publisher.run_id)
            return True
        found = "no version of this run" if number is None else f"version {number}"
        raise ForkRequiredError(
            "the trainer's state is not the run's head", field="step", found=f"step {step}, which is {found}",
            expected=f"version {publisher.version} of run {publisher.run_id}, step {head}",
            do="resume from the newest checkpoint; or weight_sync.fork=true to start a new run that names this one as "
            "its parent; or another weight_sync.uri",
        )  # fmt: skip

    def _tell_paths(self) -> None:
        others = {name: path for name, path in sorted(self.paths.items()) if path != SHARD}
        self.log.info("%d tensors are published from where they lie, %d another way",
                      len(self.paths) - len(others), len(others))  # fmt: skip
        for name, path in list(others.items())[:_LISTED]:
            self.log.warning("%s is %s", name, path)
        if len(others) > _LISTED:
            self.log.warning("and %d more", len(others) - _LISTED)

    # --- the fleet ---
    # only while no version is in flight: its collectives run on the same group, in the background

    def _fleet(self) -> dict[str, float]:
        """The fleet's metrics, on every rank. Collective."""
        publisher = self._publisher
        if publisher is None:
            return {}
        told = together(self._group, bytes, lambda _: json.dumps(self._look(publisher)).encode())
        return dict(json.loads(told))

    def _look(self, publisher: Publisher) -> dict[str, float]:
        """On rank 0."""
        try:
            return fleet_metrics(publisher.acknowledgements(), publisher.run_id, publisher.version)
        except WeightSyncError as error:  # the metrics of this step lack them; nothing else depends on them
            self.log.warning("acknowledgements cannot be read: %s", error)
            return {}

    def _wait_for(self, publisher: Publisher, replicas: int) -> None:
        """Until so many replicas serve the version, or the limit; training goes on either way."""

        def wait(_: object) -> bytes:
            deadline = time.monotonic() + self.config.timeout_s
            while (seen := self._look(publisher)).get(PREFIX + "acknowledged", 0) < replicas:
                if time.monotonic() > deadline:
                    self.log.error("only %g of %d replicas serve version %s after %g s",
                                   seen.get(PREFIX + "acknowledged", 0), replicas, publisher.version,
                                   self.config.timeout_s)  # fmt: skip
                    break
                time.sleep(self.config.poll_s)
            return json.dumps(seen).encode()

        self._waited = dict(json.loads(together(self._group, bytes, wait)))
