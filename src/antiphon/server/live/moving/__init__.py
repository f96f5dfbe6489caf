"""Lets a session outlive its host: stores it, hands it over, and resumes it at another host."""
