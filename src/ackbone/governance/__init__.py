"""Governance: rules that allow, deny or delay a run, or ask a person first.

`rules.py` has the rules and the decision, `expression.py` the conditions on a payload, `reading.py`
reads a rule file, and `rulebook.py` has the rules in force. It imports core only.
"""
