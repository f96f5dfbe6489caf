"""`python -m antiphon.settings > docs/settings.md`."""

from antiphon.settings import markdown

if __name__ == "__main__":
    print(markdown(), end="")
