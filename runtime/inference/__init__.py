"""Using a trained model: its weights, outputs for given rows, loss and metrics of a data set, text that it writes."""
