"""The Wyoming protocol, which Home Assistant speaks: the data of its events (docs/wire/wyoming.md)."""
