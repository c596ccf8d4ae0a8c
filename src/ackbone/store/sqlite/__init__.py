"""The store on SQLite: hand-written SQL inside the writer thread's transactions."""
