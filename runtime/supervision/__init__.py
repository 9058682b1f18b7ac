"""Ranks as processes: starting, rendezvous, consistency check, watching, termination."""
