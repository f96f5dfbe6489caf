"""Bridges: full-duplex dialects for clients that were written for other servers. See docs/wire/bridges.md."""
