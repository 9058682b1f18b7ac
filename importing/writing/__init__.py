"""Values with named axes → the text of a `.par` file."""
