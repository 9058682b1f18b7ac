"""The functions of the language: their parameters and typing rules."""
