"""Fuzzing of everything that reads what a client sends: mutations of recorded frames, deterministic by their seed."""
