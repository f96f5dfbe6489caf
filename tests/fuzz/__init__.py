"""Fuzzing of everything that reads clients' input, with mutations of recorded frames. A seed determines all inputs."""
