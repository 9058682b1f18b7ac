"""What this machine's device and links take, measured with the parts of which runs are made: `partita profile`."""
