"""Telephone calls: tickets and signatures, calls that wait for an application, calls out, and AudioSocket."""
