"""Queue triggers: foreign messages come in, agent runs start."""
