"""Creates worker actors for the controller, which is handed this and imports no worker code.

Loads Ray, but no model code: a controller that was restarted is back in a moment.
"""

from dataclasses import dataclass

import ray

from pdserve.cluster.base.config import DeploymentConfig
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Role
from pdserve.deploy.locator import ControllerLocator, GangLocator, NodeHost, namespace_of
from pdserve.workers.actors import RankActor, WorkerActor
from pdserve.workers.plan import WorkerPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCreator:
    """Creates the actor of a worker of one deployment; see launcher.Creator."""

    config: DeploymentConfig
    model_folder: str
    served_name: str
    channel: ChannelSettings
    worker_actor: type[WorkerActor] = WorkerActor
    rank_actor: type[RankActor] = RankActor

    def __call__(self, worker_id: WorkerId, role: Role, rank: int, leader: str, options: dict[str, object]) -> object:
        """Create the actor of a rank with Ray's `options`; `leader` is the name of the worker's rank 0."""
        plan = WorkerPlan(
            worker_id=worker_id,
            role=role,
            config=self.config,
            model_folder=self.model_folder,
            served_name=self.served_name,
            channel=self.channel,
        )
        namespace = namespace_of(self.config.name)
        own_host = NodeHost(self.config.ingress.host)
        if rank:
            follower = ray.remote(self.rank_actor).options(**options)
            return follower.remote(plan, own_host, rank, GangLocator(namespace, leader))
        return ray.remote(self.worker_actor).options(**options).remote(plan, own_host, ControllerLocator(namespace))
