"""What GET /cluster/requests/ID answers: why the request went where it went, and its timelines. Pure."""

from pdserve.cluster.base.messages import Explanation
from pdserve.cluster.base.route import Candidate, Decision
from pdserve.router.json_types import Json


def explanation_body(client_id: str, explanation: Explanation) -> Json:
    """Return the answer; times are seconds."""
    return {
        "id": client_id,
        "object": "pdserve.request",
        "decisions": [_decision(decision) for decision in explanation.decisions],
        "timelines": [
            {"process": trace.process, "lines": timeline.splitlines()}
            for trace in sorted(explanation.traces, key=lambda trace: trace.process)
            for timeline in trace.timelines
        ],
    }


def _decision(decision: Decision) -> Json:
    return {
        "request_id": decision.request_id,
        "attempt": decision.attempt,
        "age_s": round(decision.age_s, 3),
        "num_prompt_tokens": decision.num_prompt_tokens,
        "num_considered": decision.num_considered,
        "reason": decision.reason,
        "candidates": [_candidate(candidate) for candidate in decision.candidates],
    }


def _candidate(candidate: Candidate) -> Json:
    return {
        "owner": candidate.owner,
        "prefill": candidate.prefill,
        "is_chosen": candidate.is_chosen,
        "ttft_s": _seconds(candidate.ttft_s),
        "room_s": _seconds(candidate.room_s),
        "queue_s": _seconds(candidate.queue_s),
        "compute_s": _seconds(candidate.compute_s),
        "transfer_s": _seconds(candidate.transfer_s),
        "decode_s": _seconds(candidate.decode_s),
        "inflicted_s": _seconds(candidate.inflicted_s),
        "num_cached_by_owner": candidate.num_cached_by_owner,
        "num_cached_by_prefill": candidate.num_cached_by_prefill,
        "total_s": _seconds(candidate.total_s),
    }


def _seconds(value: float) -> float | None:
    """None stands for what cannot be: a pair without a link."""
    return round(value, 6) if value < float("inf") else None
