"""Merging metrics of several processes."""

from prometheus_client.parser import text_string_to_metric_families

from pdserve.cluster.base.metrics import IngressMetrics, WorkerMetrics, merge_metrics


def test_merged_text_parses_with_one_header_a_family_and_a_process_label() -> None:
    first, second, ingress = WorkerMetrics(), WorkerMetrics(), IngressMetrics()
    first.running.set(3)
    second.running.set(4)
    first.ended.labels("stop").inc()
    second.ended.labels("stop").inc(2)
    ingress.finished.labels("chat", "stop").inc(5)
    text = merge_metrics({"worker:a": first.text(), "worker:b": second.text(), "ingress:c": ingress.text()})
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = {
        (sample.name, sample.labels["process"], sample.labels.get("reason")): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert samples["pdserve_running_sequences", "worker:a", None] == 3
    assert samples["pdserve_running_sequences", "worker:b", None] == 4
    assert samples["pdserve_sequences_ended_total", "worker:b", "stop"] == 2
    assert samples["pdserve_requests_finished_total", "ingress:c", "stop"] == 5


def test_nothing_to_merge_is_an_empty_text() -> None:
    assert merge_metrics({}) == "\n"
