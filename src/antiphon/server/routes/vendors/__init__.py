"""The routes of other vendors: a module for each."""
