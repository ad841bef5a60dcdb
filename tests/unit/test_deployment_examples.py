"""The alert rules of the examples keep up with the code: metrics, labels, runbooks. promtool runs their own tests."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from txbox.instrumentation.metrics import METRICS, Kind

REPOSITORY = Path(__file__).parents[2]
MONITORING = REPOSITORY / "examples" / "monitoring"
RUNBOOKS = REPOSITORY / "docs" / "runbooks.md"
OF_SCRAPES = {"job", "instance", "namespace", "pod"}
"""Labels that Prometheus adds."""


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


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
    return series


def queries() -> Iterator[tuple[str, str]]:
    """Every PromQL expression of the examples, with where it stands."""
    for rule in rules():
        yield f"alert {rule['alert']}", rule["expr"]


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
