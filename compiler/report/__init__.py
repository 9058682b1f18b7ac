"""What a compiled program is, for people: numbers, traffic, memory, predictions, reasons."""
