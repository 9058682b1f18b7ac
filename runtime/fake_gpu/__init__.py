"""A whole rank on a GPU that is not there: shapes, devices, dtypes, lifetimes and order, without a number computed."""
