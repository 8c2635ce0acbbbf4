"""Programs around the library: commands, trainer, reports, planning and the self-test."""
