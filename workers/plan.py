"""What a worker's processes are told when they are made. Whoever makes them needs this, and no model code."""

from dataclasses import dataclass

from pdserve.cluster.base.config import DeploymentConfig
from pdserve.cluster.base.engine_config import EngineConfig
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker; the same for each of its ranks."""

    worker_id: WorkerId
    role: Role
    config: DeploymentConfig
    model_folder: str
    served_name: str
    channel: ChannelSettings

    @property
    def engine(self) -> EngineConfig:
        """The engine section of the worker's role."""
        return self.config.engine_of(self.role)

    @property
    def num_threads(self) -> int:
        """Threads of the engine of each rank."""
        return self.config.threads_of(self.role)
