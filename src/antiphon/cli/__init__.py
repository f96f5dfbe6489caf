"""The command line: one module for each command. `arguments` declares the commands' arguments, `main` runs them."""
