"""The memory for keys and values, and the bookkeeping of its holders."""
