"""antiphon: a self-hosted server for live speech, over the protocols clients already speak."""

__version__ = "0.1.0"
