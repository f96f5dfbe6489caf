"""Bridges: the full-duplex dialects of other servers' clients, for full-duplex sessions. See docs/wire/bridges.md."""
