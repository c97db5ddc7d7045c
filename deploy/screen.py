"""What the command line shows: progress lines and the status table."""

import math
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve.cluster.base.route import Decision
from pdserve.cluster.base.worker_info import ClusterStatus, WorkerView
from pdserve.deploy.records import DeploymentRecord

STEP = 0.1


class ProgressLines:
    """Shows stages: a live bar on a terminal, a line a stage elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("")
        self._stage = ""
        self._shown = 0.0

    def __enter__(self) -> "ProgressLines":
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def show(self, stage: str, share: float) -> None:
        """Show the finished share of a stage."""
        if stage != self._stage:
            self._stage, self._shown = stage, 0.0
            self._console.print(f"{stage} …")
        elif share >= 1.0 or share - self._shown >= STEP:
            self._shown = share
        else:
            return
        self._status.update(f"{stage}: {share:.0%}")

    def say(self, line: str) -> None:
        """Show a line."""
        self._console.print(line, soft_wrap=True)
        self._status.update(line)


def status_table(record: DeploymentRecord, status: ClusterStatus) -> RenderableType:
    """Return the table that `pdserve status` prints."""
    table = Table(title=f"{record.name} at {record.url} (model {record.served_name})", title_justify="left")
    for name in (
        "worker",
        "role",
        "state",
        "pid",
        "numerics",
        "running",
        "waiting",
        "transfers now",
        "free blocks",
        "memory",
        "steps",
    ):
        table.add_column(name, justify="left" if name in ("worker", "role", "state", "numerics") else "right")
    for worker in status.workers:
        table.add_row(*_cells(worker))
    for worker_id in status.starting:
        table.add_row(worker_id, "", "starting")
    links = Table(title="links: decode worker ← prefill worker", title_justify="left")
    for name in ("worker", "from", "transport", "state", "transfers now", "received", "note"):
        links.add_column(name)
    for view in status.workers:
        for link in view.load.links:
            size = f"{link.num_bytes / (1 << 20):.1f} MiB"
            has_ranks = any(other.source_rank or other.sink_rank for other in view.load.links)
            ranks = (f" rank {link.sink_rank}", f" rank {link.source_rank}") if has_ranks else ("", "")
            links.add_row(
                view.info.worker_id + ranks[0],
                link.peer + ranks[1],
                link.transport,
                link.state,
                str(link.num_transfers),
                size,
                link.note,
            )
    lines = [Text(f"controller pid {status.controller_pid}")]
    lines += [Text(str(pause)) for pause in status.pauses]
    if status.rollout:
        lines.append(Text(f"rolling restart: {status.rollout}"))
    lines += [
        Text(f"{view.info.worker_id}: {view.info.numerics_note}") for view in status.workers if view.info.numerics_note
    ]
    lines += [Text(f"last death: {death}") for death in status.last_deaths]
    return Group(table, *([links] if links.row_count else []), *lines)


def decision_table(decision: Decision) -> RenderableType:
    """Return the candidates of a decision, best first, as `pdserve explain` prints them."""
    title = (
        f"{decision.request_id} attempt {decision.attempt}, {decision.num_prompt_tokens} tokens, "
        f"{decision.num_considered} candidates (milliseconds): {decision.reason}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("owner", "prefill", "first token", "room", "queue", "compute", "transfer", "decode", "inflicted"):
        table.add_column(name, justify="left" if name in ("owner", "prefill") else "right")
    for name in ("cached there", "by owner", "total"):
        table.add_column(name, justify="right")
    for candidate in decision.candidates:
        times = (
            candidate.ttft_s,
            candidate.room_s,
            candidate.queue_s,
            candidate.compute_s,
            candidate.transfer_s,
            candidate.decode_s,
            candidate.inflicted_s,
        )
        table.add_row(
            ("→ " if candidate.is_chosen else "  ") + candidate.owner,
            candidate.prefill or "LOCAL",
            *map(_milliseconds, times),
            str(candidate.num_cached_by_prefill),
            str(candidate.num_cached_by_owner),
            _milliseconds(candidate.total_s),
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f}" if math.isfinite(seconds) else "no link"


def _cells(worker: WorkerView) -> list[str]:
    info, load = worker.info, worker.load
    return [
        info.worker_id,
        info.role,
        worker.state,
        str(info.pid),
        f"{info.numerics_class} {info.numerics_digest[:8]}",
        str(load.num_running),
        str(load.num_waiting),
        str(load.num_receiving + load.num_sending),
        f"{load.num_free_blocks}/{load.num_blocks}",
        f"{info.memory_bytes / (1 << 30):.2f} GiB",
        str(load.num_steps),
    ]
