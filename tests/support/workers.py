"""Worker facts for tests of the control plane."""

from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.prefix_hash import PrefixIdentity
from pdserve.cluster.base.worker_info import (
    Endpoint,
    NumericsClass,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
    WorkerView,
)


def make_info(
    worker_id: WorkerId,
    *,
    incarnation: str = "life",
    endpoint: Endpoint | None = None,
    max_model_len: int = 1024,
    role: Role | None = None,
) -> WorkerInfo:
    """Return the facts of a worker; its role is what its name begins with, unless told."""
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=Incarnation(incarnation),
        role=role or _role(worker_id),
        endpoint=endpoint or Endpoint(host="127.0.0.1", port=1),
        pid=1,
        device="cpu",
        model_name="tiny",
        model_digest="m",
        numerics_digest="n",
        numerics_class=NumericsClass.BITWISE,
        numerics_note="",
        vocab_size=512,
        max_model_len=max_model_len,
        num_blocks=64,
        block_size=16,
        max_running=16,
        max_batch_tokens=512,
        prefix_identity=PrefixIdentity(model_digest="m", kv_dtype="float32", numerics_digest="n"),
        kv_token_bytes=1024,
        memory_bytes=1,
    )


def _role(worker_id: WorkerId) -> Role:
    prefix = worker_id.rpartition("-")[0]
    return Role(prefix) if prefix in list(Role) else Role.MIXED


def make_view(name: str, load: WorkerLoad | None = None, state: WorkerState = WorkerState.READY) -> WorkerView:
    """Return a worker in a view."""
    return WorkerView(info=make_info(WorkerId(name)), state=state, load=load or WorkerLoad())
