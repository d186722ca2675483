"""What has been launched and is not committed yet."""

from deepinfer_lab.engine.lane import Mark, Ticket


class Flight:
    """Tickets in order of launch, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._tickets: list[Ticket] = []
        self._ends: dict[str, Mark] = {}  # of the newest launch of each lane
        self.latest = ""  # phase of the newest launch

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def room(self) -> int:
        """How many more may be launched. The limit may have been lowered since the others were."""
        return max(0, self.limit - len(self._tickets))

    @property
    def ends(self) -> list[Mark]:
        """Once all of these have passed, so has everything launched so far."""
        return list(self._ends.values())

    @property
    def batches(self) -> list[Ticket]:
        """Those with decode rows."""
        return [ticket for ticket in self._tickets if ticket.work.decodes]

    @property
    def chunks(self) -> list[Ticket]:
        """Those with a prompt chunk."""
        return [ticket for ticket in self._tickets if ticket.work.chunk]

    def add(self, ticket: Ticket) -> None:
        self._tickets.append(ticket)
        self._ends[ticket.lane] = ticket.finished
        self.latest = ticket.work.phase

    def take_finished(self) -> list[Ticket]:
        """Remove and return what has finished, in order."""
        late: set[str] = set()  # a lane runs in order: asked later, its next ticket might look done before this one
        finished, running = [], []
        for ticket in self._tickets:
            if ticket.lane not in late and ticket.finished.query():
                finished.append(ticket)
            else:
                late.add(ticket.lane)
                running.append(ticket)
        self._tickets = running
        return finished

    def wait(self) -> None:
        """For a decode batch, where one is in flight, and not for the long prefill beside it."""
        (self.batches or self._tickets)[0].finished.wait()

    def wait_for_all(self) -> None:
        for ticket in self._tickets:
            ticket.finished.wait()
