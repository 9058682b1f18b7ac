"""The process that outlives the supervisor: it owns the ranks' process group and their private directory.

The launcher runs this file as a program of its own, as leader of the process group that every rank joins. It
makes the directory (mode 700), prints its path and reads its standard input, of which only the supervisor
holds the other end. When that closes, whether the supervisor ended or was killed, the directory is removed
and the whole group killed, this process with it. So nothing has to run in a dying supervisor, and nothing
remains after it.
"""

import os
import shutil
import signal
import sys
import tempfile


def main() -> None:
    """Make the directory, wait for the end of the supervisor, clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    directory = tempfile.mkdtemp(prefix="partita-")
    try:
        sys.stdout.write(directory + "\n")
        sys.stdout.flush()
        while os.read(0, 4096):
            pass
    except OSError:
        pass  # the supervisor was killed before it read the path
    # Renamed first: a rank that is still alive can no longer create files in it.
    gone = directory + ".gone"
    os.rename(directory, gone)
    shutil.rmtree(gone, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
