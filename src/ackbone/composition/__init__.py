"""The parts that `App` is put together from. Like `app.py`, these modules name concrete classes."""
