"""Partita: declarative training. The public Python face; see docs/ for the language and the commands."""

__version__ = "0.1.0"
