"""Recorded sessions: written while they run, read back, drawn."""
