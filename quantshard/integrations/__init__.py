"""Public import paths of the framework integrations; the code is in `quantshard.interop.frameworks`."""
