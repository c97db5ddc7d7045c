"""Creates and removes worker actors: the only place that makes placement groups.

Workers and their placement groups are named and detached: with a normal life they would die with the controller. Names
carry the worker id, so a restarted controller finds them. Everything here blocks; the controller calls it in a thread.
"""

import asyncio
import logging
from collections.abc import Callable

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.worker_info import Role

logger = logging.getLogger(__name__)

Creator = Callable[[WorkerId, Role, dict[str, object]], object]
"""Creates the actor of a worker in a role, with Ray options; injected: the control plane imports no worker code."""


class Launcher:
    """Makes workers of one deployment, in the present Ray namespace."""

    def __init__(self, deployment: str, namespace: str, num_cpus: float, create: Creator) -> None:
        self._prefix = f"{deployment}:worker:"
        self._namespace = namespace
        self._num_cpus = num_cpus
        self._create = create

    def start(self, worker_id: WorkerId, role: Role) -> None:
        """Create a worker's placement group and actor; they are scheduled when resources allow."""
        name = self._prefix + worker_id
        group = placement_group([{"CPU": self._num_cpus}], strategy="PACK", name=name, lifetime="detached")
        self._create(
            worker_id,
            role,
            {
                "name": name,
                "namespace": self._namespace,
                "lifetime": "detached",
                "num_cpus": self._num_cpus,
                "max_restarts": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            },
        )
        logger.info("worker_id=%s created", worker_id)

    async def wait_started(self, worker_id: WorkerId) -> None:
        """Return when the worker serves. Raises what its loading raised (as RayError), or its death."""
        try:
            actor = await asyncio.to_thread(ray.get_actor, self._prefix + worker_id, self._namespace)
        except ValueError:
            return  # removed in the meantime
        await actor.wait_started.remote()

    def remove(self, worker_id: WorkerId) -> None:
        """Kill a worker and remove its placement group; fine if either is gone."""
        name = self._prefix + worker_id
        try:
            ray.kill(ray.get_actor(name, namespace=self._namespace))
        except ValueError:
            logger.debug("worker_id=%s its actor is already gone", worker_id)
        self._remove_group(name)

    def running(self) -> list[WorkerId]:
        """Return the workers whose actor exists; remove groups that lost theirs."""
        names = [
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == self._namespace and entry["name"].startswith(self._prefix)
        ]
        for name in self._group_names():
            if name not in names:
                logger.warning("placement group %s has no worker: removed", name)
                self._remove_group(name)
        return [WorkerId(name.removeprefix(self._prefix)) for name in names]

    def remove_all(self) -> None:
        """Remove every worker and group of the deployment."""
        for worker_id in self.running():
            self.remove(worker_id)
        for name in self._group_names():
            self._remove_group(name)

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
