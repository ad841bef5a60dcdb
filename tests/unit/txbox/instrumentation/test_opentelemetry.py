"""The OpenTelemetry exporter, against the real SDK."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from support.txbox.event_story import LOST, RESTORED, STORY, WHO
from txbox.instrumentation.opentelemetry import OpenTelemetryHook


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader: InMemoryMetricReader) -> Iterator[MeterProvider]:
    provider = MeterProvider([reader], shutdown_on_exit=False)
    yield provider
    provider.shutdown()


def points(reader: InMemoryMetricReader) -> dict[tuple[str, frozenset[tuple[str, Any]]], Any]:
    """Every data point, by its metric's name and its attributes."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        (metric.name, frozenset(point.attributes.items())): point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def key(name: str, **attributes: str) -> tuple[str, frozenset[tuple[str, Any]]]:
    return name, frozenset({"subscriber": "billing", **attributes}.items())


def test_a_story_is_counted(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    hook = OpenTelemetryHook(provider)
    for event in STORY:
        hook(event)
    found = points(reader)
    assert found[key("txbox.deliveries", outcome="processed")].value == 2
    assert found[key("txbox.deliveries", outcome="duplicate")].value == 1
    assert found[key("txbox.deliveries", outcome="failed")].value == 1
    assert found[key("txbox.ack.failures")].value == 1
    assert found[key("txbox.retries", sqlstate="40001")].value == 1
    assert found[key("txbox.commit.duration")].sum == 0.25
    assert found[key("txbox.commit.duration")].explicit_bounds[0] == 0.001
    assert found[key("txbox.heartbeat.failures")].value == 1


def test_an_outage_shows_in_the_gauges(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    hook = OpenTelemetryHook(provider)
    for events, up in ((STORY, 1), (LOST, 0), (RESTORED, 1)):
        for event in events:
            hook(event)
        found = points(reader)
        assert found[key("txbox.broker.up")].value == up
        assert found[key("txbox.database.up")].value == up


def test_the_source_is_an_attribute_if_asked_for(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    hook = OpenTelemetryHook(provider, source_attribute=True)
    for event in STORY:
        hook(event)
    assert points(reader)[key("txbox.commit.duration", source=WHO[1])].count == 1


def test_without_an_sdk_nothing_happens_and_nothing_fails() -> None:
    hook = OpenTelemetryHook()
    for event in (*STORY, *LOST, *RESTORED):
        hook(event)
