"""Governance: rules decide before a run whether it may happen, waits for a person, or must wait.

`rules.py` the values and the decision · `expression.py` conditions on the payload · `reading.py`
entries of a rule file become rules · `rulebook.py` the rules in force. Imports core only.
"""
