"""Text → `Spec`: sources and spans, diagnostics, parser, syntax tree, type checker, settings, formatter."""
