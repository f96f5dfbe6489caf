"""Many machines: doors in front of hosts, and what hosts say to each other."""
