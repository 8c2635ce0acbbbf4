"""Compatibility modules with the names and paths of other libraries, for scripts that change only an import."""
