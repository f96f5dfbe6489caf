"""Fuzzing of everything that reads clients' input: mutations of recorded frames, deterministic by their seed."""
