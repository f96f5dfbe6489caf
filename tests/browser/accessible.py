"""Checks the accessibility of a page: axe finds nothing serious."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

GRAVE = ("serious", "critical")


def everybody_can_use(page: Page, where: str) -> None:
    """Fail if axe finds a serious problem for screen readers, keyboards or weak eyes. `where`: for the message."""
    found = Axe().run(page).response["violations"]
    grave = [f"{v['id']}: {[n['html'][:120] for n in v['nodes']]}" for v in found if v["impact"] in GRAVE]
    assert not grave, (where, grave)
