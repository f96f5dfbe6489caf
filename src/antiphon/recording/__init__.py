"""Recorded sessions: writing them while they run, reading them back, and drawing them."""
