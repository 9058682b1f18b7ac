"""Files for models of Hugging Face: what `partita init CONFIG.json` writes for the families that it knows."""
