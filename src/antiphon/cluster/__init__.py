"""Running on several machines: doors in front of hosts, and the connections between hosts."""
