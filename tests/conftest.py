"""Settings for all tests."""

import os
import signal
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# How long an example takes is the machine's business: no test depends on it. `make test` runs the same examples each
# time, so that what fails is what was changed; `make soak` runs others, and more (`--hypothesis-profile=new`). What
# failed can be run again from the printed blob.
settings.register_profile("partita", deadline=None, derandomize=True, print_blob=True, max_examples=20)
settings.register_profile("new", deadline=None, derandomize=False, print_blob=True)
# Where mistakes are planted (`python -m tests.planted`) an example that fails is enough, however large it is.
FIRST_FAILURE = {"phases": [Phase.explicit, Phase.generate], "report_multiple_bugs": False}
settings.register_profile("planted", settings.get_profile("partita"), **FIRST_FAILURE)
settings.load_profile("partita")

# Ids that tests make are kept for no other run.
_CACHE = tempfile.TemporaryDirectory(prefix="partita-cache-")
os.environ["PARTITA_CACHE"] = _CACHE.name

# What a shell starts in the background ignores Ctrl-C, and so would every run that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `few(n)`, all cases but n, evenly spread, are for long runs."""
    cases = defaultdict[tuple[str, int], list[pytest.Item]](list)
    for item in items:
        few = item.get_closest_marker("few")
        if few is not None and item.get_closest_marker("soak") is None:
            cases[item.nodeid.partition("[")[0], few.args[0]].append(item)
    for (_, count), own in cases.items():
        chosen = {i * len(own) // count for i in range(count)}
        for i, item in enumerate(own):
            if i not in chosen:
                item.add_marker(pytest.mark.soak)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` need one that torch can use."""
    if item.get_closest_marker("gpu") is None:
        return
    if not any(Path(each).exists() for each in ("/dev/nvidiactl", "/dev/dxg")):
        pytest.skip("there is no GPU")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch cannot use the GPU")
