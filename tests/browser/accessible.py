"""Checks the accessibility of a page: axe finds no violation, of any impact."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page


def everybody_can_use(page: Page, where: str) -> None:
    """Fail if axe finds a problem for screen readers, keyboards or weak eyes. `where`: for the message."""
    violations = Axe().run(page).response["violations"]
    found = [f"{v['id']} ({v['impact']}): {[n['html'][:120] for n in v['nodes']]}" for v in violations]
    assert not found, (where, found)
