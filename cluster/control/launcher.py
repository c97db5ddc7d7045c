"""Creates and removes the actors of workers, one a rank: the only place that makes placement groups.

Workers and their placement groups are named and detached: with a normal life they would die with the controller. Names
carry the worker id, so a restarted controller finds them. Everything here blocks; the controller calls it in a thread.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.cluster.base.errors import ClientError
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.worker_info import Role
from pdserve.cluster.control.membership import role_of

logger = logging.getLogger(__name__)

RANK_MARK = "~"
"""Between the name of a worker and the number of a rank other than 0."""

Creator = Callable[[WorkerId, Role, int, str, dict[str, object]], object]
"""Creates the actor of a worker's rank in a role, with the name of its rank 0 and Ray options; injected: the control
plane imports no worker code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangShape:
    """The processes of a worker."""

    num_ranks: int
    resources: dict[str, float]
    """Of each rank, as Ray names them."""
    strategy: str
    """Ray's strategy of the placement group."""


class Launcher:
    """Makes workers of one deployment, in the present Ray namespace."""

    def __init__(self, deployment: str, namespace: str, shape_of: Callable[[Role], GangShape], create: Creator) -> None:
        self._prefix = f"{deployment}:worker:"
        self._namespace = namespace
        self._shape_of = shape_of
        self._create = create

    def start(self, worker_id: WorkerId, role: Role) -> None:
        """Create a worker's placement group and an actor for each rank; they are scheduled when resources allow."""
        name, shape = self._prefix + worker_id, self._shape_of(role)
        group = placement_group(
            [dict(shape.resources) for _ in range(shape.num_ranks)],
            strategy=shape.strategy,
            name=name,
            lifetime="detached",
        )
        for rank in range(shape.num_ranks):
            options: dict[str, object] = {
                "name": _rank_name(name, rank),
                "namespace": self._namespace,
                "lifetime": "detached",
                "num_cpus": shape.resources["CPU"],
                "num_gpus": shape.resources.get("GPU", 0),
                "max_restarts": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            }
            self._create(worker_id, role, rank, name, options)
        logger.info("worker_id=%s created, %d rank(s)", worker_id, shape.num_ranks)

    async def wait_started(self, worker_id: WorkerId) -> None:
        """Return when the worker serves. Raises what its loading raised (as RayError), or its death."""
        try:
            actor = await asyncio.to_thread(ray.get_actor, self._prefix + worker_id, self._namespace)
        except ValueError:
            return  # removed in the meantime
        await actor.wait_started.remote()

    async def wait_ended(self, worker_id: WorkerId, rank: int) -> None:
        """Wait for the end of a rank other than 0, which is the worker's. Raises its cause (as RayError)."""
        try:
            name = _rank_name(self._prefix + worker_id, rank)
            actor = await asyncio.to_thread(ray.get_actor, name, self._namespace)
        except ValueError:
            return  # removed in the meantime
        await actor.wait_ended.remote()

    def remove(self, worker_id: WorkerId) -> None:
        """Kill the ranks of a worker and remove its placement group; fine if any is gone."""
        name = self._prefix + worker_id
        for actor in self._actor_names():
            if actor.partition(RANK_MARK)[0] == name:
                self._kill(actor)
        self._remove_group(name)

    def running(self) -> list[WorkerId]:
        """Return the workers all of whose ranks exist; remove what is left of others, and their groups."""
        actors = self._actor_names()
        num_ranks = Counter(name.partition(RANK_MARK)[0] for name in actors)
        names = [name for name, count in num_ranks.items() if count == self._num_ranks(name)]
        for name in actors:
            if name.partition(RANK_MARK)[0] not in names:
                logger.warning("actor %s is of a worker that lacks ranks: killed", name)
                self._kill(name)
        for name in self._group_names():
            if name not in names:
                logger.warning("placement group %s has no worker: removed", name)
                self._remove_group(name)
        return [WorkerId(name.removeprefix(self._prefix)) for name in names]

    def _num_ranks(self, name: str) -> int:
        return self._shape_of(role_of(WorkerId(name.removeprefix(self._prefix)))).num_ranks

    def remove_all(self) -> None:
        """Remove every worker and group of the deployment."""
        for worker_id in self.running():
            self.remove(worker_id)
        for name in self._group_names():
            self._remove_group(name)

    def has_room(self, shape: GangShape) -> bool:
        """True if the resources of one more worker are free; not whether they lie as its ranks need them."""
        free = ray.available_resources()
        return all(free.get(name, 0.0) >= amount * shape.num_ranks for name, amount in shape.resources.items())

    def _actor_names(self) -> list[str]:
        return [
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == self._namespace and entry["name"].startswith(self._prefix)
        ]

    def _kill(self, name: str) -> None:
        try:
            ray.kill(ray.get_actor(name, namespace=self._namespace))
        except ValueError:
            logger.debug("actor %s is already gone", name)

    def _group_names(self) -> list[str]:
        return [
            entry["name"]
            for entry in placement_group_table().values()
            if entry["name"].startswith(self._prefix) and entry["state"] != "REMOVED"
        ]

    def _remove_group(self, name: str) -> None:
        try:
            group: PlacementGroup = get_placement_group(name)
        except ValueError:
            return
        remove_placement_group(group)


def cause_of(error: ray.exceptions.RayError, death: str) -> tuple[str, bool]:
    """Return what an actor's call raised, or `death` if its process ended; and if another start would end so too."""
    raised = getattr(error, "cause", None)
    # Not every exception has a text: MemoryError, TimeoutError, a bare assert.
    lines = str(raised or death).strip().splitlines() or [type(raised or error).__name__]
    return lines[-1], isinstance(raised, ClientError)


def _rank_name(worker_name: str, rank: int) -> str:
    return f"{worker_name}{RANK_MARK}{rank}" if rank else worker_name
