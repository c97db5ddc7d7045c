"""Every metric of pdserve, declared once. A process makes the set it fills; nothing here is global.

Labels are bounded (endpoint, reason, code), never a request id. Names carry their unit.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdserve.cluster.base.rank_messages import RankCounter

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class IngressMetrics:
    """Metrics of one ingress replica: what the client sees."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("pdserve_requests", "Requests received.", ["endpoint"], registry=self.registry)
        self.finished = Counter(
            "pdserve_requests_finished", "Endings by reason.", ["endpoint", "reason"], registry=self.registry
        )
        self.rejected = Counter(
            "pdserve_requests_rejected", "Requests refused before the engine.", ["code"], registry=self.registry
        )
        self.prompt_tokens = Counter("pdserve_prompt_tokens", "Prompt tokens accepted.", registry=self.registry)
        self.generated_tokens = Counter("pdserve_generated_tokens", "Tokens delivered.", registry=self.registry)
        self.ttft = Histogram(
            "pdserve_time_to_first_token_seconds",
            "From receipt of a request to its first token; one sample per request that got one.",
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.itl = Histogram(
            "pdserve_inter_token_latency_seconds",
            "Between consecutive tokens of one choice; several tokens in one delivery share their gap evenly.",
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.e2e = Histogram(
            "pdserve_request_duration_seconds",
            "From receipt to the ending, aborts and errors included.",
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.replays = Counter(
            "pdserve_replays", "Requests replayed after their worker was lost.", registry=self.registry
        )
        self.moves = Counter(
            "pdserve_moves", "Requests moved to another worker before theirs stopped.", registry=self.registry
        )
        self.active = Gauge("pdserve_active_requests", "Requests in this replica now.", registry=self.registry)

    def text(self) -> str:
        """Return the Prometheus text format."""
        return generate_latest(self.registry).decode()


class WorkerMetrics:
    """Metrics of one worker: what the engine does."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.running = Gauge("pdserve_running_sequences", "Sequences in the running batch.", registry=self.registry)
        self.waiting = Gauge("pdserve_waiting_sequences", "Sequences waiting for admission.", registry=self.registry)
        self.queued_prompt_tokens = Gauge(
            "pdserve_queued_prompt_tokens", "Prompt tokens not computed yet.", registry=self.registry
        )
        self.free_blocks = Gauge("pdserve_kv_blocks_free", "Free KV blocks.", registry=self.registry)
        self.total_blocks = Gauge("pdserve_kv_blocks_total", "KV blocks of the pool.", registry=self.registry)
        self.kv_slots = Gauge(
            "pdserve_kv_slots",
            "Token slots of KV blocks held by running sequences, by window; a shared block counts for each, "
            "wasted slots hold no token that is seen.",
            ["window", "kind"],
            registry=self.registry,
        )
        self.cached_blocks = Gauge(
            "pdserve_kv_blocks_cached", "Free KV blocks that still serve prefix hits.", registry=self.registry
        )
        self.admitted_tokens = Counter(
            "pdserve_prefix_queried_tokens", "Prompt tokens looked up in the prefix cache.", registry=self.registry
        )
        self.cached_tokens = Counter(
            "pdserve_prefix_hit_tokens", "Prompt tokens that the prefix cache had.", registry=self.registry
        )
        self.loaded_blocks = Counter(
            "pdserve_host_tier_loaded_blocks", "KV blocks copied back from the host tier.", registry=self.registry
        )
        self.recomputed_tokens = Counter(
            "pdserve_recomputed_tokens", "Tokens computed again after a preemption.", registry=self.registry
        )
        self.steps = Counter("pdserve_engine_steps", "Engine steps.", registry=self.registry)
        self.preemptions = Counter(
            "pdserve_preemptions", "Sequences put back for want of blocks.", registry=self.registry
        )
        self.prefilled_tokens = Counter("pdserve_prefilled_tokens", "Prompt tokens computed.", registry=self.registry)
        self.sampled_tokens = Counter("pdserve_sampled_tokens", "Tokens sampled.", registry=self.registry)
        self.ended = Counter("pdserve_sequences_ended", "Endings by reason.", ["reason"], registry=self.registry)
        self.queue_time = Histogram(
            "pdserve_queue_seconds",
            "From arrival at the worker to admission.",
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.step_fit = Gauge(
            "pdserve_engine_step_fit_seconds",
            "Fitted duration of a step: what it takes at least, per token, per sequence, per 1000 tokens of context, "
            "per 1000 pairs of a query with a key.",
            ["term"],
            registry=self.registry,
        )
        self.step_error = Gauge(
            "pdserve_engine_step_fit_relative_error",
            "Mean of |predicted / measured - 1| of steps.",
            registry=self.registry,
        )
        self.step_time = Histogram(
            "pdserve_engine_step_seconds", "Duration of a step.", buckets=LATENCY_BUCKETS, registry=self.registry
        )

    def text(self) -> str:
        """Return the Prometheus text format."""
        return generate_latest(self.registry).decode()


class TransferMetrics:
    """Metrics of KV transfers, in a worker's registry. A worker fills the side that its role has."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"pdserve_kv_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"pdserve_kv_{name}", text, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"pdserve_kv_{name}_seconds", text, buckets=LATENCY_BUCKETS, registry=registry)

        # At the source.
        self.sent = counter("transfers_sent", "Transfers that ended at their source, by state.", ("state",))
        self.sent_bytes = counter("sent_bytes", "KV bytes sent, resends included.")
        self.sending = gauge("transfers_sending", "Transfers open at this source.")
        self.slots_lent = gauge("slots_lent", "Slots that links hold.")
        self.slots_free = gauge("slots_free", "Slots that links may still borrow.")
        self.nacks = counter("nacks", "Chunks that a sink refused.")
        # At the sink.
        self.received = counter("transfers_received", "Transfers that ended at their sink, by state.", ("state",))
        self.received_bytes = counter("received_bytes", "KV bytes scattered and verified.")
        self.receiving = gauge("transfers_receiving", "Transfers open at this sink.")
        self.waiting = gauge("transfers_waiting", "Requests that wait for room before they are offered to a source.")
        self.oldest = gauge("transfer_oldest_seconds", "Since the least recent progress of an open transfer.")
        self.links = gauge("links_open", "Links to prefill workers that are open.")
        self.checksum_failures = counter("checksum_failures", "Chunks whose checksum did not hold.")
        self.failovers = counter("failovers", "Transfers that went on over another link when theirs broke.")
        self.replays = counter(
            "prefill_replays", "Prefills taken to another source, or computed locally, after a failure."
        )
        self.local = counter("local_prefills", "Prompts that a decode worker computed itself, by cause.", ("cause",))
        self.queue = seconds("queue", "From arrival at the source to the start of its computing.")
        self.first_chunk = seconds("first_chunk", "From PREFILL to the first verified chunk.")
        self.last_chunk = seconds("last_chunk", "From PREFILL to the last verified chunk.")
        self.commit = seconds("commit", "From the first token to COMMIT: what the transfer adds.")
        self.credit_stall = seconds("credit_stall", "Time in which chunks of a transfer waited for a slot.")
        self.rate = Histogram(
            "pdserve_kv_gigabytes_per_second",
            "Bytes of a transfer over the time from its first to its last chunk.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
            registry=registry,
        )
        self.early_share = Histogram(
            "pdserve_kv_early_share",
            "Share of a transfer's bytes that the sink had credited before prefill ended.",
            buckets=(0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0),
            registry=registry,
        )
        # On both sides.
        self.stale = counter("stale_messages", "Messages for a transfer that had ended, or for another life.")
        self.fences = counter("link_fences", "Links that were closed and fenced.")
        self.demotions = counter(
            "link_demotions",
            "Transports put to rest for a minute or more: one that never opened, or broke three times.",
        )
        self._of_ranks = {
            RankCounter.STALE: self.stale,
            RankCounter.FENCES: self.fences,
            RankCounter.NACKS: self.nacks,
            RankCounter.DEMOTIONS: self.demotions,
        }

    def count(self, counter: RankCounter) -> None:
        """A rank has counted something."""
        self._of_ranks[counter].inc()


def merge_metrics(parts: dict[str, str]) -> str:
    """Join the texts of several processes; each sample gets a `process` label, each family one header.

    Args:
        parts: process name → its Prometheus text.
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for process, text in sorted(parts.items()):
        family = ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                headers.setdefault(family, [line])
            elif line.startswith("# TYPE "):
                if len(headers[family]) == 1:
                    headers[family].append(line)
            elif line:
                samples.setdefault(family, []).append(_with_process(line, process))
    lines = [line for family in headers for line in (*headers[family], *samples.get(family, []))]
    return "\n".join(lines) + "\n"


def _with_process(sample: str, process: str) -> str:
    label = f'process="{process}"'
    brace = sample.find("{")
    if brace >= 0:
        return f"{sample[: brace + 1]}{label},{sample[brace + 1 :]}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
