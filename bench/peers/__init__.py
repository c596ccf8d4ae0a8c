"""Programs for the interpreter of the other queues; they import nothing of this package."""
