"""One rollout process: an engine that follows the run and sends answers back, each with the versions that made it.

Started by run.py; ends when run.py does. Owns no training.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import traceback
import uuid
from itertools import islice
from pathlib import Path

import torch
from model import load, load_tokenizer
from task import Capitals, Letters

import weight_sync
from weight_sync.adapters.engines.transformers import TransformersEngine

AHEAD = 1  # batches that may be made while the trainer is busy with the ones before
PATIENCE_S = 300.0  # after that long without a new version another batch is made: the last may have been too old


def main() -> None:
    """Generates until the parent closes our standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--task", choices=["capitals", "letters"], required=True)
    for number in ("prompts", "group", "tokens", "seed", "threads"):
        parser.add_argument(f"--{number}", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    stop = threading.Event()
    threading.Thread(target=watch_parent, args=[stop], daemon=True).start()
    engine = TransformersEngine(load(options.model), options.model, engine_id=options.name)
    with weight_sync.Replica.open(
        options.store, engine, replica_id=options.name, base=str(options.model), pause="keep"
    ) as replica:
        budget = threading.Semaphore(0)
        follower = threading.Thread(target=follow, args=[replica, budget, stop])
        follower.start()
        try:
            generate(options, engine, replica, budget, stop)
        finally:
            stop.set()
            follower.join(timeout=60)


def watch_parent(stop: threading.Event) -> None:
    """Standard input ends when the parent ends, however it ends."""
    sys.stdin.buffer.read()
    stop.set()
    threading.Event().wait(5)  # for a clean end; a parent that was killed gets no more than that
    os._exit(0)


def follow(replica: weight_sync.Replica, budget: threading.Semaphore, stop: threading.Event) -> None:
    """Applies each version as it comes, in the middle of answers, and lets one more batch be made for it."""

    def committed(report: weight_sync.SyncReport) -> None:
        print(f"version {report.version}, pause {1e3 * report.pause_s:.1f} ms, {report.path}", flush=True)
        budget.release(1 + AHEAD if report.previous is None else report.version - report.previous)

    try:
        replica.follow(on_commit=committed, stop=stop)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # an engine that cannot follow must not go on answering


def generate(
    options: argparse.Namespace,
    engine: TransformersEngine,
    replica: weight_sync.Replica,
    budget: threading.Semaphore,
    stop: threading.Event,
) -> None:
    """Answers questions in groups and sends the answers with their rewards."""
    tokenizer = load_tokenizer(options.model)
    task = Capitals() if options.task == "capitals" else Letters()
    while replica.version is None and not stop.wait(0.05):
        pass
    questions = task.questions(f"{options.seed} {options.name} {replica.version}")
    while True:
        waited = 0.0
        while not budget.acquire(timeout=0.5) and not stop.is_set() and waited < PATIENCE_S:
            waited += 0.5
        if stop.is_set():
            return
        asked = list(islice(questions, options.prompts))
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "system", "content": q.instruction}, {"role": "user", "content": q.text}],
                add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
            for q in asked
        ]
        answers = engine.generate(
            prompts, samples=options.group, max_new_tokens=options.tokens, stop=[tokenizer.eos_token_id]
        )
        groups = [uuid.uuid4().hex for _ in asked]
        batch = []
        for number, answer in enumerate(answers):
            question = asked[number // options.group]
            text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
            batch.append(
                answer.to_trajectory(
                    f"{groups[number // options.group]}-{number}",
                    group=groups[number // options.group],
                    reward=task.reward(question, text),
                    engine_id=options.name,
                    metadata={"question": question.text, "text": text},
                )
            )
        replica.send_trajectories(batch)


if __name__ == "__main__":
    main()
