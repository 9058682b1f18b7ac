"""The sharded graph → a graph for each stage, with what travels between them, and the end of the step."""
