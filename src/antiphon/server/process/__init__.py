"""The server's process towards the system: its TCP connections, and how it stops."""
