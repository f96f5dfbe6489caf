"""The Wyoming protocol: the port at which Home Assistant transcribes, speaks and converses (docs/wire/wyoming.md)."""
