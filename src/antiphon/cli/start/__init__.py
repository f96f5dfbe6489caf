"""What comes before a command's own work: checks of what it was given, and the models' files."""
