"""`python -m antiphon.settings > docs/settings.md`."""

from antiphon.settings.page import markdown

print(markdown(), end="")
