"""The bench: ackbone beside raw limits and peers, measured in one run on one machine.

    make bench                                  the whole table, about twenty minutes
    .venv/bin/python -m bench --quick           the same at small sizes, about a minute
    .venv/bin/python -m bench drain sends       some sections
    .venv/bin/python -m bench --profile         where the time of one message goes

A shared machine changes from minute to minute, so figures are compared within a run only: the
contenders of a section take turns, each figure is the best of its rounds, and what counts is the
ratio.
"""
