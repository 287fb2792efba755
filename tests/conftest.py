"""What all tests share: nothing remote, few threads, and a fresh search for counterexamples without a time limit."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs a download is a defect
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and a forked process do not go together

from hypothesis import settings

settings.register_profile("minillm", deadline=None, print_blob=True)
settings.load_profile("minillm")
