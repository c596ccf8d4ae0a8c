"""Use cases of operators: what commands and pages do, in one place."""
