"""The sections of the bench, in the order of the table."""
