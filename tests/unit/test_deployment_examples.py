"""Alert rules, dashboard and manifests under examples/ keep up with the code: metrics, labels, commands, runbooks.

What Prometheus and Kubernetes say of them is checked by `make lint-monitoring`.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from txbox.instrumentation.metrics import METRICS, Kind
from txbox.status.exporter.figures import GAUGES
from txbox_cli.app import app
from txbox_cli.queue_collector import GAUGES as QUEUE_GAUGES

REPOSITORY = Path(__file__).parents[2]
MONITORING = REPOSITORY / "examples" / "monitoring"
KUBERNETES = REPOSITORY / "examples" / "kubernetes"
RUNBOOKS = REPOSITORY / "docs" / "runbooks.md"
OF_SCRAPES = {"job", "instance", "namespace", "pod"}
"""Labels that Prometheus adds."""


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads((MONITORING / "grafana-dashboard.json").read_text())


def panels() -> list[dict[str, Any]]:
    return dashboard()["panels"]


@cache
def manifests() -> list[dict[str, Any]]:
    return [part for path in sorted(KUBERNETES.glob("*.yaml")) for part in yaml.safe_load_all(path.read_text())]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests() if manifest["kind"] == kind]


def templates() -> Iterator[tuple[str, dict[str, Any]]]:
    for manifest in (*of_kind("Deployment"), *of_kind("Job")):
        yield manifest["metadata"]["name"], manifest["spec"]["template"]


def containers() -> list[tuple[str, dict[str, Any]]]:
    return [(name, container) for name, template in templates() for container in template["spec"]["containers"]]


# --- metrics ---------------------------------------------------------------------------------------------------------


def declared() -> dict[str, set[str]]:
    """Every series that txbox has, with its labels."""
    series = {}
    for metric in METRICS:
        labels = {"subscriber", "source", *([metric.label] if metric.label else [])}
        match metric.kind:
            case Kind.COUNTER:
                series[f"{metric.prometheus}_total"] = labels
            case Kind.HISTOGRAM:
                series |= {f"{metric.prometheus}_{suffix}": labels for suffix in ("sum", "count")}
                series[f"{metric.prometheus}_bucket"] = labels | {"le"}
            case Kind.GAUGE:
                series[metric.prometheus] = labels
    for name, (_, own) in [*GAUGES.items(), *QUEUE_GAUGES.items()]:
        series[f"txbox_{name}"] = series.get(f"txbox_{name}", set()) | set(own)
    of_parts = {f"txbox_exporter_{name}": {"part"} for name in ("read_success", "read_seconds", "exact")}
    return series | {"txbox_exporter_up": set(), "txbox_exporter_read_age_seconds": set(), **of_parts}


def queries() -> Iterator[tuple[str, str]]:
    """Every PromQL expression of the examples, with where it stands."""
    for rule in rules():
        yield f"alert {rule['alert']}", rule["expr"]
    for panel in panels():
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for scaled in of_kind("ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            if trigger["type"] == "prometheus":
                yield f"scaling {scaled['metadata']['name']}", trigger["metadata"]["query"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """The series that a query selects, and the labels that it selects them by."""
    for name, matchers in re.findall(r"\b(txbox_\w+)(?:\{([^}]*)\})?", query):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', matchers)))


@pytest.mark.parametrize(("place", "query"), [pytest.param(*one, id=one[0]) for one in queries()])
def test_every_metric_and_label_of_a_query_exists(place: str, query: str) -> None:
    known = declared()
    used = dict(selectors(query))
    assert used, place
    assert used.keys() - known.keys() == set()
    for name, labels in used.items():
        assert labels - known[name] - OF_SCRAPES == set(), name
    of_all = OF_SCRAPES.union(*(known[name] for name in used))
    grouped = re.findall(r"\b(?:by|on|group_left|ignoring|without)\s*\(([^)]*)\)", query)
    assert {label.strip() for labels in grouped for label in labels.split(",") if label.strip()} - of_all == set()


def test_the_page_on_monitoring_has_every_gauge_of_the_exporter_and_no_page_another_metric() -> None:
    pages = {path.stem: path.read_text() for path in (REPOSITORY / "docs").glob("*.md")}
    section = pages["monitoring"].partition("\n## Exporter\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| (`.+`) \|$", section, re.M)
    listed = {f"txbox_{name}" for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    of_itself = {name for name in declared() if name.startswith("txbox_exporter_")}
    assert listed == of_itself | {f"txbox_{name}" for name in (*GAUGES, *QUEUE_GAUGES)}
    named = {one for text in pages.values() for one in re.findall(r"`(txbox_\w+_(?:seconds|total|up|success))`", text)}
    named -= {"txbox_watchdog_seconds"}  # of a URL
    assert {name for name in named if not declared().keys() & {name, f"{name}_sum"}} == set()


# --- alerts ----------------------------------------------------------------------------------------------------------


def test_every_alert_says_what_it_means_and_where_its_runbook_is() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in {"page", "ticket"}, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, rule["alert"]
        assert rule["annotations"]["runbook_url"].endswith(f"/runbooks.html#{rule['alert'].lower()}")


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    sections = re.findall(r"^### (\w+)$", RUNBOOKS.read_text(), re.M)
    assert sections == [rule["alert"] for rule in rules()]


@pytest.mark.parametrize("part", ["Means", "Look", "Do", "Fine"])
def test_every_runbook_says_what_to_look_at_and_what_to_do(part: str) -> None:
    for section in RUNBOOKS.read_text().split("\n### ")[1:]:
        assert f"**{part}" in section, section.partition("\n")[0]


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    tests = yaml.safe_load((MONITORING / "alerts-test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert {rule["alert"] for rule in rules()} == fired


# --- the dashboard ---------------------------------------------------------------------------------------------------


def test_the_dashboard_names_no_data_source_of_its_own() -> None:
    variables = dashboard()["templating"]["list"]
    assert {variable["name"] for variable in variables} == {"datasource", "subscriber", "destination"}
    drawn = [panel for panel in panels() if panel["type"] != "row"]
    for one in (*drawn, *(variable for variable in variables if variable["type"] == "query")):
        assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert [panel["title"] for panel in drawn if not panel["description"]] == []


def test_no_two_panels_lie_on_each_other() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for one, other in combinations([panel["gridPos"] for panel in panels()], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
        assert one["x"] + one["w"] <= 24


# --- Kubernetes ------------------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """Read arguments as the command line does; an unknown command or option, or a value that is refused, raises."""
    command: Any = typer.main.get_command(app)
    context, path = command.make_context("txbox", list(arguments)), []
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        path.append(name)
        context = command.make_context(name, rest, parent=context)
    return " ".join(path), context.params


@pytest.mark.parametrize(("name", "container"), [pytest.param(*one, id=one[0]) for one in containers()])
def test_a_container_runs_a_command_that_exists_and_has_time_to_drain(name: str, container: dict[str, Any]) -> None:
    assert container["command"] == ["txbox"]
    _, options = parse(container["args"])
    template = dict(templates())[name]
    if "stop_seconds" in options:
        assert template["spec"]["terminationGracePeriodSeconds"] > options["stop_seconds"]


@pytest.mark.parametrize(
    ("name", "container"), [pytest.param(*one, id=one[0]) for one in containers() if "migrate" not in one[0]]
)
def test_probes_and_scrapes_find_the_port_on_which_a_service_answers(name: str, container: dict[str, Any]) -> None:
    _, options = parse(container["args"])
    if "health_port" in options:
        host, port = options["health_host"], options["health_port"]
        probes = {"startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/ready"}
    else:
        host, port = options["host"], options["port"]
        probes = {"livenessProbe": "/live", "readinessProbe": "/ready"}
    assert (host, [one["containerPort"] for one in container["ports"]]) == ("0.0.0.0", [port])
    assert {key: one["httpGet"]["path"] for key, one in container.items() if key.endswith("Probe")} == probes
    assert {container[probe]["httpGet"]["port"] for probe in probes} == {container["ports"][0]["name"]}
    assert dict(templates())[name]["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": "/metrics",
    }


@pytest.mark.parametrize(("name", "container"), [pytest.param(*one, id=one[0]) for one in containers()])
def test_a_container_has_no_rights_that_it_does_not_need(name: str, container: dict[str, Any]) -> None:
    pod = dict(templates())[name]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    (url,) = [variable for variable in container["env"] if variable["name"] == "TXBOX_DATABASE_URL"]
    assert set(url["valueFrom"]) == {"secretKeyRef"}


def test_what_selects_pods_selects_those_of_a_deployment() -> None:
    labels = [manifest["spec"]["template"]["metadata"]["labels"].items() for manifest in of_kind("Deployment")]
    for manifest in (*of_kind("Deployment"), *of_kind("PodDisruptionBudget")):
        selected = manifest["spec"]["selector"]["matchLabels"].items()
        assert len([one for one in labels if selected <= one]) == 1, manifest["metadata"]["name"]


def test_what_keda_scales_exists() -> None:
    """KEDA's own schema is not at hand: what its pages on scaled objects and CloudWatch ask for."""
    deployments = {manifest["metadata"]["name"] for manifest in of_kind("Deployment")}
    assert of_kind("ScaledObject")
    for scaled in of_kind("ScaledObject"):
        assert scaled["apiVersion"] == "keda.sh/v1alpha1"
        spec = scaled["spec"]
        assert spec["scaleTargetRef"]["name"] in deployments
        assert 1 <= spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
        for trigger in spec["triggers"]:
            assert trigger["metricType"] == "AverageValue"
            metadata = trigger["metadata"]
            assert all(isinstance(value, str) for value in metadata.values())
            if trigger["type"] == "prometheus":
                assert {"serverAddress", "query"} <= metadata.keys()
                assert float(metadata["threshold"]) > 0
                continue
            assert metadata["metricName"] == "ApproximateAgeOfOldestMessage"
            assert {"awsRegion", "namespace", "dimensionName", "dimensionValue", "minMetricValue"} <= metadata.keys()
            assert float(metadata["targetMetricValue"]) > 0
