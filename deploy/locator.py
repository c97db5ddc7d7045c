"""Finds actors by their names in Ray, and nodes: handed to workers and ingresses, which know no Ray themselves."""

import asyncio
from dataclasses import dataclass

import ray

from pdserve.cluster.base.worker_info import Endpoint

CONTROLLER_NAME = "controller"


def namespace_of(deployment: str) -> str:
    """Return the Ray namespace of a deployment."""
    return f"pdserve-{deployment}"


@dataclass(frozen=True, slots=True)
class ControllerLocator:
    """Resolves the controller's endpoint; raises LookupError while there is none."""

    namespace: str

    async def __call__(self) -> Endpoint:
        """Ask Ray, then the controller."""
        try:
            controller = await asyncio.to_thread(ray.get_actor, CONTROLLER_NAME, self.namespace)
            endpoint: Endpoint = await controller.endpoint.remote()
        except (ray.exceptions.RayError, ValueError) as error:
            raise LookupError(f"no controller in namespace {self.namespace}: {error}") from error
        return endpoint


@dataclass(frozen=True, slots=True)
class NodeHost:
    """Tells a process where to listen for the others: on loopback, or where its node is reached."""

    ingress_host: str

    def __call__(self) -> str:
        """Return the ingress' own address if only this machine reaches it, else that of the node."""
        if is_loopback(self.ingress_host):
            return self.ingress_host
        address: str = ray.util.get_node_ip_address()
        return address


def is_loopback(host: str) -> bool:
    """True if only processes of this machine reach the address."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


@dataclass(frozen=True, slots=True)
class GangLocator:
    """Resolves where the other ranks of a worker join rank 0; raises LookupError while there is none."""

    namespace: str
    leader: str
    """Name of rank 0's actor."""

    async def __call__(self) -> Endpoint:
        """Ask Ray, then rank 0."""
        try:
            leader = await asyncio.to_thread(ray.get_actor, self.leader, self.namespace)
            endpoint: Endpoint = await leader.gang_endpoint.remote()
        except (ray.exceptions.RayError, ValueError) as error:
            raise LookupError(f"no rank 0 {self.leader} in namespace {self.namespace}: {error}") from error
        return endpoint
