"""Compatibility modules with the names and paths of other libraries. Scripts for these libraries only change an
import."""
