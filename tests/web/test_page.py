"""The page's files, without a browser: all references exist, and every tab has hints and a place for errors.

`make browser` tests the page's behaviour.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path, PurePosixPath

import pytest

from antiphon import __version__

WEB = Path(__file__).parents[2] / "src" / "antiphon" / "web"
HTML = (WEB / "index.html").read_text()
SCRIPTS = {str(path.relative_to(WEB)): path.read_text() for path in sorted(WEB.rglob("*.js"))}
MODULE = {name: text for name, text in SCRIPTS.items() if name.startswith("client/")}
TABS = dict(re.findall(r'<section id="(\w+)" role="tabpanel"(.*?)</section>', HTML, re.DOTALL))


def test_when_a_script_names_an_element_or_a_file_then_the_page_has_it() -> None:
    ids = set(re.findall(r'\bid="([\w-]+)"', HTML))
    for name, text in SCRIPTS.items():
        assert set(re.findall(r'\$\("([\w-]+)"\)', text)) <= ids, name
        for found in re.findall(r'(?:from|import\()\s*"\./([\w./]+)"', text):
            assert str(PurePosixPath(name).parent / found) in SCRIPTS, (name, found)
    assert {f"{tab}-error" for tab in TABS} <= ids


def test_when_the_page_is_offline_then_it_needs_nothing_from_elsewhere() -> None:
    for text in (HTML, (WEB / "style.css").read_text(), *SCRIPTS.values()):
        assert not re.search(r"""["'(](https?:)?//\w""", text)


def test_the_module_stands_alone_is_typed_and_is_packed_whole() -> None:
    for name, text in MODULE.items():
        # The client is used on other pages, so it refers to no page of ours, and to nothing outside its folder.
        assert not re.search(r'getElementById|querySelector|from "\.\./', text), name
        assert text.startswith("// @ts-check\n") or name == "client/worklets.js", name
    package = json.loads((WEB / "client" / "package.json").read_text())
    assert package["version"] == __version__
    assert package["exports"]["."]["default"] == "./antiphon.js"
    assert "dependencies" not in package


def test_whatever_the_page_and_the_module_need_is_in_the_wheel() -> None:
    project = tomllib.loads((WEB.parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["antiphon"]
    for path in (p for p in WEB.rglob("*") if p.is_file()):
        assert any(path.relative_to(WEB.parent).match(pattern) for pattern in patterns), path


@pytest.mark.parametrize("tab", ["talk", "captions", "speech", "camera"])
def test_when_a_tab_is_opened_then_it_has_a_main_button_an_alert_below_it_and_no_silent_box(tab: str) -> None:
    text = TABS[tab]
    assert len(re.findall(r'<button[^>]*class="main"', text)) + text.count("<button class=main") == 1
    alert = text.index(f'<p id="{tab}-error" class="error" role="alert"></p>')
    # Before any content that may be long.
    assert all(alert < box.start() for box in re.finditer(r'class="log|<canvas|<video', text))
    logs = re.findall(r'<div[^>]*class="log[^>]*>(\s*)', text)
    assert all(inside == "" for inside in logs)
    assert text.count("data-hint=") == len(logs)
    assert "hint" in text
    # A table scrolls in its own box if the window is too narrow.
    for table in re.finditer(r"<table", text):
        assert 'class="scroll"' in text[: table.start()].rsplit("<div", 1)[1]


def test_when_the_page_is_opened_then_the_field_of_the_key_is_hidden_and_labels_are_sentences() -> None:
    assert re.search(r'<label[^>]*id="key-field" hidden', HTML)
    labels = re.findall(r"<(?:label|button|option|summary|caption)[^>]*>([^<]+)", HTML) + re.findall(
        r'<th scope="col">([^<\n]+)', HTML
    )
    assert len(labels) > 30
    assert [text for text in labels if text.strip() and not text.strip()[0].isupper()] == []
