"""`supervise.py RANKS GRACE PROGRAM ARGUMENTS…` runs a Python program as ranks and exits as `launch` says. SAVES in the
environment says whether it saves.
"""

import json
import os
import sys

from partita.runtime.supervision.launcher import launch

saves = json.loads(os.environ.get("SAVES", "null"))
sys.exit(launch([sys.executable, *sys.argv[3:]], int(sys.argv[1]), grace=float(sys.argv[2]), saves=saves))
