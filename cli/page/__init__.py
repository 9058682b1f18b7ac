"""The page of a run that `partita report` writes and `partita watch` serves: one HTML document, which requests nothing.

What it says of a run comes from the run's directory, which somebody else may have written: text is escaped where it
becomes HTML (`markup`), and the page's own policy permits no script but its own, and no request.
"""
