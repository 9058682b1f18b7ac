"""Ranks as processes: started, found, agreed with each other, watched, ended together."""
