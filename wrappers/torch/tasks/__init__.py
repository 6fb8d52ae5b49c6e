"""Tasks of a captured pass: calls of aten operations, their rewriting and grouping, and their computation into lent memory."""
