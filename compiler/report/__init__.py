"""Reports on a compiled program: summary, communication, claims, explanations of layouts."""
