"""Bridges: the duplex dialects of other servers' clients, spoken to full-duplex sessions. docs/wire/bridges.md."""
