"""Hostile clients for `antiphon bench attack`: one function for each class of attack, and the process that runs one."""
