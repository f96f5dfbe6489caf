"""Every metric that the dashboard and the alert rules use is one that a server exports."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from antiphon.admission.headroom import Headroom
from antiphon.contracts import LanguageModel
from antiphon.server.memory import MemoryLedger
from antiphon.server.metrics import Metrics
from antiphon.settings import MemorySettings

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = re.compile(r"\b(?:antiphon|process)_[a-z_]+")


def samples() -> str:
    """Return the metrics of a server."""
    metrics = Metrics()
    metrics.watch_memory(MemoryLedger(MemorySettings()))
    metrics.watch_headroom(Headroom(None, 8), {})

    class Language:
        def load(self) -> Any:
            from antiphon.contracts import LanguageLoad

            return LanguageLoad(0, 0, 0, 0, 1, 0)

    language: Any = Language()
    model: LanguageModel = language
    metrics.watch((), lambda: 0.0, model, {})
    return metrics.text().decode()


def known() -> set[str]:
    """Return the names of all samples that a server may export, including those that have no labels yet."""
    text = samples()
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    suffixes = {"histogram": ("_bucket", "_count", "_sum")}
    return {name + suffix for name, kind in kinds for suffix in ("", *suffixes.get(kind, ()))}


def queries() -> dict[str, str]:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    panels = {f"{p['title']} {t['refId']}": t["expr"] for p in dashboard["panels"] for t in p.get("targets", ())}
    return panels | {rule["alert"]: rule["expr"] for rule in rules}


@pytest.mark.parametrize(("name", "query"), queries().items())
def test_a_query_names_metrics_that_exist(name: str, query: str) -> None:
    names = set(NAME.findall(query))
    assert names or name == "AntiphonGone"
    assert names <= known(), names - known()
    assert query.count("(") == query.count(")")


def test_what_is_1_or_0_while_something_fails_has_a_rule() -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    watched = {name for rule in rules for name in NAME.findall(rule["expr"])}
    flags = set(re.findall(r"^# HELP (\S+) [01] (?:while|once)", samples(), re.MULTILINE))
    assert "antiphon_language_model_away" in flags
    # A drain is no failure, because an operator requests it.
    assert flags - watched == {"antiphon_draining"}


def test_the_dashboard_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboard", DEPLOY / "make_dashboard.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads((DEPLOY / "grafana-dashboard.json").read_text()) == module.dashboard()


def test_every_alert_says_what_to_do_on_its_page() -> None:
    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    for rule in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]:
        assert f"`{rule['alert']}`" in page
        assert rule["annotations"]["summary"]
