"""`partita verify`: translation validation of a file, and a run of its proxy against one device."""
