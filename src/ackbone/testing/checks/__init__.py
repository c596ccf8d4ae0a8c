"""The checks of the conformance suite: plain async functions over a `Trial`, one claim each."""
