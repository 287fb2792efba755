"""What all tests share: nothing remote, a fresh search for counterexamples without a time limit, one browser."""

import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs a download is a defect
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and a forked process do not go together

import pytest
from hypothesis import settings

from minillm.lab import style

settings.register_profile("minillm", deadline=None, print_blob=True)
settings.load_profile("minillm")


# One browser a module, not one a session: while it runs, its event loop keeps notebooks from running in this process.
@pytest.fixture(scope="module")
def browser():
    """Headless Chromium. Without one a test is skipped, unless the variable CI is set: then its absence is an error."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        reason = f"no Chromium on this machine, looked for {', '.join(names)}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


def draw(batch, device):
    """A frame of an explorer: a line that `batch` moves, a title that `device` gives."""
    fig, ax = style.subplots(4, 2)
    ax.plot([0, 1], [0, batch], color=style.color("decode"))
    ax.bar([0.5], [2], color=style.color("weights"))
    ax.set(ylim=(0, 9), title=device, xlabel="x", ylabel="y (ms)")
    return fig, f"A line that rises to {batch} milliseconds on {device}"
