"""Looking into checkpoints: contents, verification, comparison."""
