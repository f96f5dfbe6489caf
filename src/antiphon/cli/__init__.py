"""The command line: one module for each command. `arguments` declares their arguments, `main` runs them."""
