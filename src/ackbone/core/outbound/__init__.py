"""Rules of outgoing replies: which may be sent, what an attempt changes, who may see them."""
