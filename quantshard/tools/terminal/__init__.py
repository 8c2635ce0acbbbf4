"""Output of commands: the only modules that print or write files."""
