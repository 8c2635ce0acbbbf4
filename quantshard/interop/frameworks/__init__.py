"""Integrations with training frameworks: one file each, imported by the user."""
