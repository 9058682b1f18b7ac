"""`supervise.py RANKS GRACE PROGRAM ARGUMENTS…` runs a Python program as ranks and exits as `launch` says."""

import sys

from partita.runtime.supervision.launcher import launch

sys.exit(launch([sys.executable, *sys.argv[3:]], int(sys.argv[1]), grace=float(sys.argv[2])))
