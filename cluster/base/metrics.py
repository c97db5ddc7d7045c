"""Every metric of pdserve, declared once. A process makes the set it fills; nothing here is global.

Labels are bounded (endpoint, reason, code), never a request id. Names carry their unit.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
        self.step_time = Histogram(
            "pdserve_engine_step_seconds", "Duration of a step.", buckets=LATENCY_BUCKETS, registry=self.registry
        )

    def text(self) -> str:
        """Return the Prometheus text format."""
        return generate_latest(self.registry).decode()


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
