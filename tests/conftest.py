"""Settings of every test: one thread per process, and the same hypothesis examples in every run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; ranks started by a test inherit it

from hypothesis import settings

settings.register_profile("house", derandomize=True, deadline=None)
settings.load_profile("house")
