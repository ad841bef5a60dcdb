"""The Prometheus exporter, against the real library."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from support.txbox.event_story import LOST, RESTORED, STORY, WHO
from txbox import instrumentation as events
from txbox.instrumentation.prometheus import PrometheusHook

LABELS = {"subscriber": "billing"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_a_story_is_counted(registry: CollectorRegistry) -> None:
    hook = PrometheusHook(registry)
    for event in STORY:
        hook(event)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {**LABELS, **labels})

    assert value("txbox_received_age_seconds_bucket", le="60.0") == 0
    assert value("txbox_received_age_seconds_bucket", le="300.0") == 1
    assert value("txbox_deliveries_total", outcome="processed") == 2
    assert value("txbox_deliveries_total", outcome="duplicate") == 1
    assert value("txbox_deliveries_total", outcome="failed") == 1
    assert value("txbox_ack_failures_total") == 1  # a failed delivery is handed back, not acked
    assert value("txbox_retries_total", sqlstate="40001") == 1
    assert value("txbox_commit_seconds_sum") == 0.25
    assert value("txbox_commit_seconds_bucket", le="0.25") == 1
    assert value("txbox_commit_seconds_bucket", le="0.1") == 0
    assert value("txbox_heartbeat_failures_total") == 1
    assert value("txbox_maintained_rows_total", subscriber="txbox:maintenance", task="inbox") == 5
    assert value("txbox_bulk_load_rows_total", outcome="applied") == 7
    assert value("txbox_horizon_age_seconds") == 60
    assert value("txbox_oldest_id_age_seconds") == 30
    assert value("txbox_paused") == 1
    hook(events.Resumed(*WHO))
    assert value("txbox_paused") == 0
    assert value("txbox_audited_messages", outcome="missing") == 1
    assert value("txbox_audit_balanced") == 0


def test_the_runway_has_a_bounded_number_of_labels_and_none_that_is_stale(registry: CollectorRegistry) -> None:
    hook, inbox = PrometheusHook(registry), ("txbox:maintenance", "processed_message")

    def rows() -> list[float]:
        (metric,) = [one for one in registry.collect() if one.name == "txbox_inbox_rows"]
        return [sample.value for sample in sorted(metric.samples, key=lambda one: int(one.labels["generation"]))]

    hook(events.RunwayRead(*inbox, 7.0, -5.0, [(number, 1) for number in range(1, 12)]))
    assert rows() == [1, 2, 3, 4, 5, 6, 7, 8, 9 + 10 + 11]
    hook(events.RunwayRead(*inbox, None, None, [(4, 1)]))
    assert rows() == [4] + [0] * 8
    labels = {"subscriber": inbox[0]}
    assert registry.get_sample_value("txbox_maintenance_age_seconds", labels) == 7
    assert registry.get_sample_value("txbox_rotation_due_seconds", labels) == -5


def test_an_outage_shows_in_the_gauges(registry: CollectorRegistry) -> None:
    hook = PrometheusHook(registry)
    for events_, up in ((STORY, 1), (LOST, 0), (RESTORED, 1)):
        for event in events_:
            hook(event)
        assert registry.get_sample_value("txbox_broker_up", LABELS) == up
        assert registry.get_sample_value("txbox_database_up", LABELS) == up
    assert registry.get_sample_value("txbox_publisher_overdue_total", LABELS) == 1


def test_the_source_is_a_label_if_asked_for(registry: CollectorRegistry) -> None:
    hook = PrometheusHook(registry, source_label=True)
    for event in STORY:
        hook(event)
    labels = {"subscriber": WHO[0], "source": WHO[1]}
    assert registry.get_sample_value("txbox_deliveries_total", {**labels, "outcome": "processed"}) == 2
    assert registry.get_sample_value("txbox_commit_seconds_count", labels) == 1


def test_every_metric_is_ours_and_exposed(registry: CollectorRegistry) -> None:
    hook = PrometheusHook(registry)
    for event in STORY:
        hook(event)
    lines = generate_latest(registry).decode().splitlines()
    assert all(line.startswith(("#", "txbox_")) for line in lines)


def test_two_on_one_registry_are_refused(registry: CollectorRegistry) -> None:
    PrometheusHook(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        PrometheusHook(registry)


def test_every_kind_of_event_is_taken(registry: CollectorRegistry) -> None:
    taken = {type(event) for event in (*STORY, *LOST, *RESTORED)}
    kinds = {getattr(events, name) for name in events.__all__} - {events.Event, events.Hook, events.emit}
    assert taken == kinds
