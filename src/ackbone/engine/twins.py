"""Claims that were granted twice: the second run of one does not begin while the first goes on."""

from __future__ import annotations

from ackbone.core.store import Run

_Claim = tuple[str, str, str, int, int]


class Twins:
    """Runs of this process, by their claim, from their start until the store has their end.

    A store that forgot a claim grants it again, with the same token: the first run may go on and
    commit. Only if it is refused is the second one's turn.
    """

    def __init__(self) -> None:
        self._second: dict[_Claim, Run | None] = {}

    def begin(self, run: Run) -> bool:
        """May it begin? If not, it is kept for the end of the first one."""
        claim = _claim_of(run)
        if claim in self._second:
            self._second[claim] = run
            return False
        self._second[claim] = None
        return True

    def end(self, run: Run) -> Run | None:
        """The store has answered for it; returns the one that was kept, if there is one."""
        return self._second.pop(_claim_of(run), None)


def _claim_of(run: Run) -> _Claim:
    message, token = run.message, run.token
    return message.tenant_id, run.subscription, message.id, token.worker_id, token.epoch
