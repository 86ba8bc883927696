"""Exchanges facts about plans between the workers of a `MultiWorkerMirroredStrategy`.

All of them run one program, so each plans the same step at its first call, but for an arena of its own. A worker that
refuses its limit must not leave the others waiting in a collective, and all should carry out one plan where that fits
all arenas. So they exchange messages once, after each has planned, through the key-value store of the strategy's
coordination service.

Not handled: later plans, for an arena that has changed or for other sizes. Each worker makes those by itself. The order
of its collectives is the traced one under any plan (passes/prepare/collective_order.py), so there is no deadlock.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from base64 import b85decode, b85encode
from collections.abc import Sequence
from typing import Any

from tfswap.analysis.collectives import spans_workers
from tfswap.ir.graph import Graph
from tfswap.plan.plan import Plan

JOBS = ("chief", "worker")
"""Jobs that train together; an evaluator runs by itself."""
PART = 1 << 20
"""Characters of a plan in one value: messages have a maximum size."""

_meetings = itertools.count()


class Meeting:
    """One planning that all workers take part in, each once.

    Args:
        rank: which worker this is, of those that train.
        workers: how many there are.
    """

    def __init__(self, rank: int, workers: int):
        self.rank = rank
        self.workers = workers
        self._number = next(_meetings)  # the same on all workers, which run one program
        self._rounds = itertools.count()

    def exchange(self, value: Any) -> list[Any]:
        """The JSON value of each worker, by rank; waits for all."""
        topic = f"tfswap/{self._number}/{next(self._rounds)}"
        self._put(f"{topic}/{self.rank}", json.dumps(value))
        return [json.loads(self._get(f"{topic}/{rank}")) for rank in range(self.workers)]

    def hand_out(self, plan: Plan) -> Plan:
        """The first worker's plan; each worker passes its own."""
        topic = f"tfswap/{self._number}/{next(self._rounds)}"
        if self.rank == 0:
            text = b85encode(zlib.compress(plan.to_json().encode())).decode()
            parts = [text[i : i + PART] for i in range(0, len(text), PART)]
            for i, part in enumerate(parts):
                self._put(f"{topic}/{i}", part)
            self._put(topic, str(len(parts)))
            return plan
        parts = [self._get(f"{topic}/{i}") for i in range(int(self._get(topic)))]
        return Plan.from_json(zlib.decompress(b85decode("".join(parts))).decode())

    @staticmethod
    def _put(key: str, value: str) -> None:
        from tensorflow.python.eager import context

        context.context().set_config_key_value(key, value)

    @staticmethod
    def _get(key: str) -> str:
        from tensorflow.python.eager import context

        return context.context().get_config_key_value(key)


def meeting(graphs: Sequence[Graph]) -> Meeting | None:
    """The meeting about a step whose collectives all workers take part in; None where there are no others.

    Args:
        graphs: of the step, one for each part.
    """
    from tensorflow.python.eager import context

    running = context.context()
    server: Any = running._collective_ops_server_def
    if server is None or running.coordination_service is None or not spans_workers(graphs):
        return None
    tasks = [(job.name, task) for job in server.cluster.job if job.name in JOBS for task in sorted(job.tasks)]
    own = server.job_name, server.task_index
    if own not in tasks or len(tasks) < 2:
        return None
    return Meeting(tasks.index(own), len(tasks))


def digest(plans: Sequence[Plan]) -> str:
    """A digest that is equal for plans with the same actions on the same graphs."""
    texts = [f"{plan.fingerprint}{plan.actions!r}" for plan in plans]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def highest(floors: Sequence[int | None]) -> tuple[int, int] | None:
    """Of the workers that refuse, the rank with the highest floor, and that floor; None where none refuses."""
    refused = [(floor, rank) for rank, floor in enumerate(floors) if floor is not None]
    if not refused:
        return None
    floor, rank = max(refused, key=lambda entry: (entry[0], -entry[1]))
    return rank, floor
