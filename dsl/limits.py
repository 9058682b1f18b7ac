"""What a file may not exceed, so that checking any input stays within two seconds and 500 MiB.

Sizes are checked before anything is made of them: what is too large gets a diagnostic.
"""

FILE_BYTES = 1 << 20  # of a file and all that it imports; again, of all texts that these name
TOKENS = 30_000  # likewise; a 96-layer model with every layout of this project has about a thousand
IMPORTS = 100
BRACKETS = 64  # brackets within brackets
# Checking recurses over expressions and brackets only: by at most 650 Python frames, and Python stops at 1,000.
EXPRESSION_DEPTH = 150
SCOPES = 64  # blocks called by blocks, and repeats within repeats
NAME_CHARACTERS = 200
DIGITS = 40
EXPONENT = 300
# Of a number that is not zero, in its plain unit: what is beyond is no float, or zero.
LARGEST = 10**300
AXIS_SIZE = 1 << 40
ELEMENTS = 1 << 62
RANKS = 1 << 20
LOCAL_RANKS = 256  # started by `run` on one machine: a file alone must not fill it with processes
STEPS = 2_000_000  # of a model, with every block and repeat expanded
CHECKED = 30_000  # expressions typed, each block once for each set of axes that it is called over
ERRORS = 50
