"""`partita profile`: measures this machine's device and links with the components that runs are made of."""
