"""Whose voice a turn is."""
