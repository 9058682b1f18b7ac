"""Input limits, so that checking any file takes at most two seconds and 500 MiB.

Sizes are checked before anything is built from them; exceeding a limit is reported as a diagnostic.
"""

FILE_BYTES = 1 << 20  # of a file with its imports; separately, of all text files that these name
TOKENS = 30_000  # of a file with its imports; a 96-layer model with every layout of this project has about a thousand
IMPORTS = 100
BRACKETS = 64  # nesting depth
# Checking recurses only over expressions and brackets: at most 650 frames deep, where Python's limit is 1,000.
EXPRESSION_DEPTH = 150
SCOPES = 64  # nesting depth of block calls and repeats
NAME_CHARACTERS = 200
DIGITS = 40
EXPONENT = 300
# Nonzero magnitudes range from 1 / LARGEST to LARGEST in base units, so that they convert to finite, nonzero floats.
LARGEST = 10**300
AXIS_SIZE = 1 << 40
ELEMENTS = 1 << 62
RANKS = 1 << 20
LOCAL_RANKS = 256  # started by `run` on one machine, so that a file cannot flood it with processes
STEPS = 2_000_000  # of a model with all blocks and repeats expanded
PARAMETERS = 100_000  # that `weights` may name; more stand in no file that another program writes
FOREIGN = 200_000  # tensors that `weights` name in all iterations and at all indices
CHECKED = 30_000  # expressions checked; a block counts once for each set of axes that it is called over
ERRORS = 50
