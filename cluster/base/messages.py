"""Every message that crosses a process boundary, and who sends it to whom.

    ingress → worker       Generate, Abort, Reclaim
    worker → ingress       Tokens, Busy, NotFound
    worker → controller    Register, Report, CacheUpdate, Failed
    controller → worker    Registered, Peers, SendSnapshot, Drain
    ingress → controller   Subscribe, RouteQuery, MetricsQuery, ExplainQuery
    controller → ingress   View, RouteAnswer, MetricsAnswer, Explanation
    controller → any       MetricsRequest, TraceRequest;  any → controller: MetricsText, Trace
    worker ↔ worker        transfer_messages
    rank ↔ rank 0          rank_messages, of one worker
    both ways              Heartbeat (sent by the channel itself)

Adding a message means adding a class here and to MESSAGE_TYPES; its place in that tuple is its code on the wire.
"""

from dataclasses import dataclass

from pdserve.cluster.base.ids import Incarnation, IngressId, RequestId, WorkerId
from pdserve.cluster.base.rank_messages import RANK_MESSAGES, RankMessage
from pdserve.cluster.base.request import Request, TokenDelta
from pdserve.cluster.base.route import Decision, Placeable, Route
from pdserve.cluster.base.transfer_messages import (
    Accept,
    Chunk,
    CloseLink,
    Commit,
    Credit,
    Final,
    FirstToken,
    Hello,
    HelloOk,
    LinkAttached,
    LinkOffer,
    Nack,
    OpenLink,
    Prefill,
    Progress,
    Refuse,
    Reject,
    TransferAbort,
)
from pdserve.cluster.base.worker_info import WorkerInfo, WorkerLoad, WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Keeps a channel alive; sent and consumed by the channel itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Run this request. Answered by Tokens until an ending, or by Busy.

    `prefill_worker_ids`: who may compute the prompt, best first; none: the worker does it itself. `may_wait`: queue
    here if there is no room now, instead of answering Busy.
    """

    request: Request
    prefill_worker_ids: tuple[WorkerId, ...] = ()
    may_wait: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop the request; no further Tokens for this attempt are wanted."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """After a reconnect: go on sending this attempt's tokens from `next_index`."""

    request_id: RequestId
    attempt: int
    next_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """All new tokens of one engine step for one ingress, in one frame."""

    deltas: tuple[TokenDelta, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """The worker cannot take the request; nothing of it is kept. Not overloaded means that it serves nothing."""

    request_id: RequestId
    attempt: int
    reason: str
    is_overloaded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFound:
    """Answer to Reclaim: the worker no longer holds that attempt."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A worker is ready; repeated whenever its channel to the controller is new."""

    info: WorkerInfo
    load: WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The controller took the worker in, and wants a report that often."""

    worker_id: WorkerId
    report_interval_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The prefill workers that are ready: a decode worker keeps a link to each."""

    workers: tuple[WorkerInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Periodic load of a worker."""

    worker_id: WorkerId
    load: WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Take no new requests: this worker is about to be stopped. What is here goes on; ingresses move it elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUpdate:
    """What changed in a worker's prefix cache, by the names of prefix_hash, one after the other.

    Changes are numbered: these are `first_no` … `next_no` - 1, of which each name's last one is told. A snapshot holds
    everything instead, and `first_no` is without meaning; what does not fit one message follows in more updates.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    first_no: int
    next_no: int
    is_snapshot: bool
    stored: bytes
    evicted: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSnapshot:
    """The controller has missed changes of a worker's prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The worker's engine failed; it serves nothing any more and wants to be replaced."""

    worker_id: WorkerId
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribe:
    """An ingress wants views; also registers it for the merged metrics."""

    ingress_id: IngressId


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The cluster as the controller sees it now."""

    sequence_no: int
    workers: tuple[WorkerView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """Where should this request go?"""

    query_id: int
    request: Placeable


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteAnswer:
    """A route; without workers `route.reason` says why."""

    query_id: int
    route: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsQuery:
    """An ingress asks for the metrics of every process."""

    query_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRequest:
    """The controller asks one process for its metrics."""

    query_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsText:
    """Metrics of one process in the Prometheus text format."""

    query_id: int
    process: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAnswer:
    """Metrics of all processes that answered in time."""

    query_id: int
    texts: tuple[MetricsText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainQuery:
    """An ingress asks what is known of a client request, by the id that the client was given."""

    query_id: int
    client_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a client request went where it went, and what every process has noted of it."""

    query_id: int
    decisions: tuple[Decision, ...]
    traces: tuple["Trace", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """The controller asks a process what it knows of a client request; `prefix` is the id the client was given."""

    query_id: int
    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Timelines of the requests that match, one text each, oldest first."""

    query_id: int
    process: str
    timelines: tuple[str, ...]


MESSAGE_TYPES: tuple[type["Message"], ...] = (
    Heartbeat,
    Generate,
    Abort,
    Reclaim,
    Tokens,
    Busy,
    NotFound,
    Register,
    Registered,
    Report,
    Failed,
    Subscribe,
    View,
    RouteQuery,
    RouteAnswer,
    MetricsQuery,
    MetricsRequest,
    MetricsText,
    MetricsAnswer,
    Peers,
    TraceRequest,
    Trace,
    Hello,
    HelloOk,
    Refuse,
    OpenLink,
    LinkOffer,
    LinkAttached,
    CloseLink,
    Prefill,
    Accept,
    Reject,
    Chunk,
    Credit,
    Nack,
    FirstToken,
    Final,
    Commit,
    TransferAbort,
    Progress,
    CacheUpdate,
    SendSnapshot,
    ExplainQuery,
    Explanation,
    Drain,
    *RANK_MESSAGES,
)
Message = (
    Heartbeat
    | Generate
    | Abort
    | Reclaim
    | Tokens
    | Busy
    | NotFound
    | Register
    | Registered
    | Report
    | Failed
    | Subscribe
    | View
    | RouteQuery
    | RouteAnswer
    | MetricsQuery
    | MetricsRequest
    | MetricsText
    | MetricsAnswer
    | Peers
    | TraceRequest
    | Trace
    | Hello
    | HelloOk
    | Refuse
    | OpenLink
    | LinkOffer
    | LinkAttached
    | CloseLink
    | Prefill
    | Accept
    | Reject
    | Chunk
    | Credit
    | Nack
    | FirstToken
    | Final
    | Commit
    | TransferAbort
    | Progress
    | CacheUpdate
    | SendSnapshot
    | ExplainQuery
    | Explanation
    | Drain
    | RankMessage
)
