"""Sections of `python -m bench.turns`: what decides whose turn it is, measured on recordings."""
