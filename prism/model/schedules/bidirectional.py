"""DualPipe and DualPipeV: forwards and backwards of two directions side by side (DeepSeek-AI 2024).

Both go through the same eight phases; they differ in what the two directions are: two copies of the model that
run against each other over all ranks, or the way down and the way up of one model folded in half.
"""

from __future__ import annotations

from collections.abc import Callable

from prism.model.schedules.generators import two_chunks, v_shape
from prism.model.schedules.schedule import Op, Schedule, ScheduleError

#: which stage and flow a rank serves in direction 0 or 1
Where = Callable[[int], tuple[int, int]]


def dualpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Two copies of the model in opposite directions; `microbatches` of both together.

    Both copies of a stage need the sum of their gradients, which is an exchange between two ranks that the graph of a step
    (`prism.context.build_dag`) does not have.

    Raises
    ------
    ScheduleError
        If `ranks` or `microbatches` is odd, or there are fewer than ``2 ranks`` microbatches.
    """
    if chunks != 1:
        raise ScheduleError(f"dualpipe has 1 chunk a rank and copy, got {chunks}")
    if ranks < 2 or ranks % 2 or microbatches % 2 or microbatches < 2 * ranks:
        raise ScheduleError(
            f"dualpipe needs an even number of ranks and an even number of at least 2 x ranks microbatches, "
            f"got {ranks} and {microbatches}"
        )
    half = ranks // 2
    orders = []
    for rank in range(ranks):
        second = int(rank >= half)

        def where(direction: int, rank: int = rank, second: int = second) -> tuple[int, int]:
            flow = direction ^ second
            return (rank if flow == 0 else ranks - 1 - rank), flow

        inward = min(rank, ranks - 1 - rank)
        orders.append(_phases(where, inward, half, microbatches // 2))
    there = tuple(range(ranks))
    return _schedule(orders, (there, there[::-1]))


def dualpipev(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """One model, folded: two chunks a rank, down the ranks and up again.

    Raises
    ------
    ScheduleError
        With fewer than ``2 ranks`` microbatches, or other than 2 chunks.
    """
    two_chunks("dualpipev", ranks, microbatches, chunks, 2 * ranks)
    orders = []
    for rank in range(ranks):

        def where(direction: int, rank: int = rank) -> tuple[int, int]:
            return (rank if direction == 0 else 2 * ranks - 1 - rank), 0

        orders.append(_phases(where, rank, ranks, microbatches))
    return _schedule(orders, (v_shape(ranks),))


def _schedule(orders: list[_List], placement: tuple[tuple[int, ...], ...]) -> Schedule:
    return Schedule(
        tuple(tuple(o.ops) for o in orders), placement, tuple(frozenset(o.pairs) for o in orders)
    )


class _List:
    """A rank's ops, microbatches counted by direction, weights put off in a queue."""

    def __init__(self, where: Where) -> None:
        self.ops: list[Op] = []
        self.pairs: set[int] = set()
        self._where, self._forth, self._back = where, [0, 0], [0, 0]
        self._put_off: list[Op] = []

    def forward(self, direction: int) -> None:
        stage, flow = self._where(direction)
        self.ops.append(Op("F", stage, self._forth[direction], flow))
        self._forth[direction] += 1

    def backward(self, direction: int, *, weights_later: bool = False) -> None:
        stage, flow = self._where(direction)
        m = self._back[direction]
        self.ops.append(Op("B" if weights_later else "BW", stage, m, flow))
        if weights_later:
            self._put_off.append(Op("W", stage, m, flow))
        self._back[direction] += 1

    def weights(self) -> None:
        self.ops.append(self._put_off.pop(0))

    def all_weights(self) -> None:
        while self._put_off:
            self.weights()

    def both(self, forth: int, back: int) -> None:
        """A forward of one direction beside a backward of the other."""
        self.pairs.add(len(self.ops))
        self.forward(forth)
        self.backward(back)


def _phases(where: Where, inward: int, depth: int, microbatches: int) -> _List:
    """The eight phases of a rank that lies `inward` from the end of a pipe of `depth` ranks."""
    own, outer = _List(where), depth - inward - 1
    for _ in range(2 * outer):
        own.forward(0)
    for _ in range(inward + 1):
        own.forward(0)
        own.forward(1)
    for _ in range(outer):
        own.backward(1, weights_later=True)
        own.weights()
        own.forward(1)
    for i in range(microbatches - 2 * depth + inward + 1):
        if i == 0 and outer == 0:
            own.forward(0)
            own.backward(1)
        else:
            own.both(0, 1)
        own.both(1, 0)
    for _ in range(outer):
        own.backward(1)
        own.both(1, 0)
    later = False
    for i in range(inward + 1):
        turn = i == (inward + 1) // 2
        later = later or (turn and inward % 2 == 1)
        own.backward(1, weights_later=later)
        later = later or (turn and inward % 2 == 0)
        own.backward(0, weights_later=later)
    for _ in range(outer):
        own.weights()
        own.backward(0, weights_later=True)
    own.all_weights()
    return own
