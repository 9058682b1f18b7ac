"""Settings for all tests."""

from hypothesis import settings

# How long an example takes is the machine's business: no test depends on it. What failed can be run again
# from the printed blob.
settings.register_profile("partita", deadline=None, print_blob=True)
settings.load_profile("partita")
