"""The command line: one module for each command; `main` parses the arguments."""
