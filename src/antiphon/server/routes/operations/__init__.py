"""Routes for those who run a server: probes, metrics, the profiler, and draining."""
