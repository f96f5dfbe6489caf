"""Lets a session outlive its host: how it is stored, handed over, and resumed by another host."""
