"""The memory that keys and values lie in, and who holds how much of it."""
