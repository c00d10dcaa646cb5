"""Settings for all tests: Hypothesis gives the same examples on each run, fresh ones in `make deep`."""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("deep", deadline=None, database=None, print_blob=True, max_examples=2000)
settings.load_profile(os.environ.get("TIDEFAST_HYPOTHESIS", "same"))
