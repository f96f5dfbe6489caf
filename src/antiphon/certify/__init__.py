"""Measures how many sessions of each kind a server holds: `antiphon certify`."""
