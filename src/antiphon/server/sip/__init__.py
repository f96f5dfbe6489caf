"""The SIP port of a server: signalling, calls in both directions, and registration at a provider."""
