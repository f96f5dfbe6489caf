"""Recorded sessions: written while they run, read back, and drawn."""
