"""Text → Spec: source places, diagnostics, parser, syntax tree, type checker, settings, formatter."""
