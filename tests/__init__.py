"""The tests of quantshard. The folder mirrors the package; `distributed` has those that need several ranks."""
