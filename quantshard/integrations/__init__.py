"""Public import paths of the framework integrations, which are implemented in `quantshard.interop.frameworks`."""
