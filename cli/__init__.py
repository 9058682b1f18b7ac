"""The commands, one module each (`command`)."""
