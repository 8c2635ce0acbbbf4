"""Frameworks that train models of others: one file each, imported by the user."""
