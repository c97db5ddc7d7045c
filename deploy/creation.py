"""Creates worker actors for the controller, which is handed this and imports no worker code.

Loads Ray, but no model code: a controller that was restarted is back in a moment.
"""

from dataclasses import dataclass

import ray

from pdserve.cluster.base.config import DeploymentConfig
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Role
from pdserve.deploy.locator import ControllerLocator, namespace_of
from pdserve.workers.actors import WorkerActor


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCreator:
    """Creates the actor of a worker of one deployment; see launcher.Creator."""

    config: DeploymentConfig
    model_folder: str
    served_name: str
    channel: ChannelSettings

    def __call__(self, worker_id: WorkerId, role: Role, options: dict[str, object]) -> object:
        """Create the actor with Ray's `options`."""
        actor = ray.remote(WorkerActor).options(**options)
        return actor.remote(
            worker_id,
            role,
            self.config,
            self.model_folder,
            self.served_name,
            self.channel,
            ControllerLocator(namespace_of(self.config.name)),
        )
