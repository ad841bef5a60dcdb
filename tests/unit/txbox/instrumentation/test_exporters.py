"""The exporters of events, each against its real library: one story, and what it comes to."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from support.txbox.event_story import LOST, RESTORED, STORY, WHO
from txbox import instrumentation as events
from txbox.instrumentation.metrics import METRICS, Kind, Metric
from txbox.instrumentation.opentelemetry import OpenTelemetryHook
from txbox.instrumentation.prometheus import PrometheusHook

NAMED = {metric.prometheus.removeprefix("txbox_"): metric for metric in METRICS}
SUFFIXES = {Kind.COUNTER: "_total", Kind.HISTOGRAM: "_sum", Kind.GAUGE: ""}


class Prometheus:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def hook(self, *, by_source: bool = False) -> events.Hook:
        return PrometheusHook(self.registry, source_label=by_source)

    def value(self, metric: Metric, labels: dict[str, str]) -> float | None:
        return self.registry.get_sample_value(metric.prometheus + SUFFIXES[metric.kind], labels)


class OpenTelemetry:
    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader], shutdown_on_exit=False)

    def hook(self, *, by_source: bool = False) -> events.Hook:
        return OpenTelemetryHook(self.provider, source_attribute=by_source)

    def point(self, metric: Metric, labels: dict[str, str]) -> Any:
        data = self._reader.get_metrics_data()
        assert data is not None
        of_metric = [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for one in scope.metrics
            if one.name == metric.opentelemetry
            for point in one.data.data_points
        ]
        (found,) = [point for point in of_metric if dict(point.attributes or {}) == labels]
        return found

    def value(self, metric: Metric, labels: dict[str, str]) -> float:
        point = self.point(metric, labels)
        value: float = point.sum if metric.kind is Kind.HISTOGRAM else point.value
        return value


@pytest.fixture
def prometheus() -> Prometheus:
    return Prometheus()


@pytest.fixture
def opentelemetry() -> Iterator[OpenTelemetry]:
    made = OpenTelemetry()
    yield made
    made.provider.shutdown()


@pytest.fixture(params=["prometheus", "opentelemetry"])
def exporter(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def value(exporter: Any, name: str, subscriber: str = WHO[0], **labels: str) -> float | None:
    found: float | None = exporter.value(NAMED[name], {"subscriber": subscriber, **labels})
    return found


def test_a_story_is_counted(exporter: Any) -> None:
    hook = exporter.hook()
    for event in STORY:
        hook(event)
    assert value(exporter, "received_age_seconds") == 90
    assert value(exporter, "deliveries", outcome="processed") == 2
    assert value(exporter, "deliveries", outcome="duplicate") == 1
    assert value(exporter, "deliveries", outcome="failed") == 1
    assert value(exporter, "ack_failures") == 1  # a failed delivery is handed back, not acked
    assert value(exporter, "retries", sqlstate="40001") == 1
    assert value(exporter, "commit_seconds") == 0.25
    assert value(exporter, "heartbeat_failures") == 1
    assert value(exporter, "maintained_rows", "txbox:maintenance", task="inbox") == 5
    assert value(exporter, "bulk_load_rows", outcome="applied") == 7
    assert value(exporter, "horizon_age_seconds") == 60
    assert value(exporter, "oldest_id_age_seconds") == 30
    assert value(exporter, "paused") == 1
    hook(events.Resumed(*WHO))
    assert value(exporter, "paused") == 0
    assert value(exporter, "audited_messages", outcome="missing") == 1
    assert value(exporter, "audit_balanced") == 0


def test_an_outage_shows_in_the_gauges(exporter: Any) -> None:
    hook = exporter.hook()
    for story, up in ((STORY, 1), (LOST, 0), (RESTORED, 1)):
        for event in story:
            hook(event)
        assert value(exporter, "broker_up") == value(exporter, "database_up") == up
    assert value(exporter, "publisher_overdue") == 1


def test_the_source_is_named_if_asked_for(exporter: Any) -> None:
    hook = exporter.hook(by_source=True)
    for event in STORY:
        hook(event)
    assert value(exporter, "deliveries", source=WHO[1], outcome="processed") == 2
    assert value(exporter, "commit_seconds", source=WHO[1]) == 0.25


def test_seconds_have_buckets_of_ours(prometheus: Prometheus, opentelemetry: OpenTelemetry) -> None:
    for hook in (prometheus.hook(), opentelemetry.hook()):
        for event in STORY:
            hook(event)
    labels = {"subscriber": WHO[0]}
    assert opentelemetry.point(NAMED["commit_seconds"], labels).explicit_bounds[0] == 0.001
    for name, le, count in (("received_age", "60.0", 0), ("received_age", "300.0", 1), ("commit", "0.1", 0)):
        assert prometheus.registry.get_sample_value(f"txbox_{name}_seconds_bucket", {**labels, "le": le}) == count
    assert prometheus.registry.get_sample_value("txbox_commit_seconds_bucket", {**labels, "le": "0.25"}) == 1
    lines = generate_latest(prometheus.registry).decode().splitlines()
    assert all(line.startswith(("#", "txbox_")) for line in lines), "every metric is ours"


def test_the_runway_has_a_bounded_number_of_labels_and_none_that_is_stale(exporter: Any) -> None:
    hook, inbox = exporter.hook(), ("txbox:maintenance", "processed_message")

    def rows() -> list[float | None]:
        return [value(exporter, "inbox_rows", inbox[0], generation=str(number)) for number in range(9)]

    hook(events.RunwayRead(*inbox, 7.0, -5.0, [(number, 1) for number in range(1, 12)]))
    assert rows() == [1, 2, 3, 4, 5, 6, 7, 8, 9 + 10 + 11]
    hook(events.RunwayRead(*inbox, None, None, [(4, 1)]))
    assert rows() == [4] + [0] * 8
    assert value(exporter, "maintenance_age_seconds", inbox[0]) == 7
    assert value(exporter, "rotation_due_seconds", inbox[0]) == -5


def test_two_on_one_registry_are_refused(prometheus: Prometheus) -> None:
    prometheus.hook()
    with pytest.raises(ValueError, match="Duplicated"):
        prometheus.hook()


def test_without_an_sdk_nothing_happens_and_nothing_fails() -> None:
    hook = OpenTelemetryHook()
    for event in (*STORY, *LOST, *RESTORED):
        hook(event)


def test_every_kind_of_event_is_in_the_story() -> None:
    told = {type(event) for event in (*STORY, *LOST, *RESTORED)}
    kinds = {getattr(events, name) for name in events.__all__} - {events.Event, events.Hook, events.emit}
    assert told == kinds
