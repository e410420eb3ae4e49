"""Schedules with one direction of flow, as functions from (ranks, microbatches, chunks).

Rules and sources with each. Orders of zero-bubble schedules are not unique: these are the handcrafted ones
of Qi et al. (2024), which assume that F, B and W take alike.
"""

from __future__ import annotations

from prism.model.schedules.schedule import Op, Schedule, ScheduleError


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards, first in first out (Huang et al. 2019).

    Examples
    --------
    >>> print(*gpipe(1, 2).ranks[0])
    F0@0 F1@0 BW0@0 BW1@0
    """
    _plain("gpipe", ranks, microbatches, chunks)
    return _linear(
        [
            [Op(kind, s, m) for kind in ("F", "BW") for m in range(microbatches)]
            for s in range(ranks)
        ]
    )


def gpipe_lifo(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """GPipe with the backwards in reverse order, as in the paper's figure."""
    _plain("gpipe_lifo", ranks, microbatches, chunks)
    forth = range(microbatches)
    return _linear(
        [
            [Op("F", s, m) for m in forth] + [Op("BW", s, m) for m in reversed(forth)]
            for s in range(ranks)
        ]
    )


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """One forward, one backward after a warm-up of ``ranks - 1 - s`` forwards on stage s
    (PipeDream-Flush, Narayanan et al. 2021).

    Examples
    --------
    >>> print(*one_f_one_b(2, 2).ranks[0])
    F0@0 F1@0 BW0@0 BW1@0
    """
    _plain("1f1b", ranks, microbatches, chunks)
    orders = []
    for s in range(ranks):
        warm = min(ranks - 1 - s, microbatches)
        own = [Op("F", s, m) for m in range(warm)]
        for m in range(microbatches - warm):
            own += [Op("F", s, warm + m), Op("BW", s, m)]
        orders.append(own + [Op("BW", s, m) for m in range(microbatches - warm, microbatches)])
    return _linear(orders)


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: `chunks` virtual stages a rank, changed every `ranks` microbatches (Narayanan et al.
    2021). Stage s runs ``2 (ranks - 1 - s) + (chunks - 1) ranks`` forwards first.

    Raises
    ------
    ScheduleError
        If `microbatches` is no multiple of `ranks`, or there are fewer than 2 chunks.
    """
    _positive(ranks, microbatches)
    if chunks < 2:
        raise ScheduleError(f"interleaved needs at least 2 chunks, got {chunks}; with 1 it is 1f1b")
    if microbatches % ranks:
        raise ScheduleError(
            f"interleaved needs a multiple of {ranks} microbatches, got {microbatches}; "
            f"{microbatches // ranks * ranks or ranks} or {(microbatches // ranks + 1) * ranks} would do"
        )
    total = microbatches * chunks

    def turn(k: int, kind: str, s: int) -> Op:
        """The k-th forward or backward of a rank."""
        group, within = divmod(k, ranks * chunks)
        chunk, m = divmod(within, ranks)
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return Op(kind, chunk * ranks + s, group * ranks + m)

    orders = []
    for s in range(ranks):
        warm = min(2 * (ranks - 1 - s) + (chunks - 1) * ranks, total)
        own = [turn(k, "F", s) for k in range(warm)]
        for k in range(total - warm):
            own += [turn(warm + k, "F", s), turn(k, "BW", s)]
        orders.append(own + [turn(k, "BW", s) for k in range(total - warm, total)])
    return Schedule(tuple(map(tuple, orders)), (tuple(v % ranks for v in range(ranks * chunks)),))


def zb_h1(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B with the weights' part held back s microbatches on stage s: the memory of 1F1B, a third of its
    bubble (Qi et al. 2024)."""
    _plain("zb_h1", ranks, microbatches, chunks)
    return _linear(
        [_held_back(s, microbatches, ranks - 1 - s, s, forward_first=True) for s in range(ranks)]
    )


def zb_h2(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """``2 (ranks - s) - 1`` forwards first, weights held back 2 s microbatches: no bubble between a rank's
    first and last op, for twice the memory (Qi et al. 2024)."""
    _plain("zb_h2", ranks, microbatches, chunks)
    return _linear(
        [
            _held_back(s, microbatches, 2 * (ranks - s) - 1, 2 * s, forward_first=False)
            for s in range(ranks)
        ]
    )


def _held_back(s: int, microbatches: int, warm: int, back: int, *, forward_first: bool) -> list[Op]:
    """Forwards and backwards in turn after `warm` forwards; weights `back` microbatches late."""
    warm = min(warm, microbatches)
    own = [Op("F", s, m) for m in range(warm)]
    for b in range(microbatches):
        forward = [Op("F", s, warm + b)] if warm + b < microbatches else []
        weights = [Op("W", s, b - back)] if b >= back else []
        turn = [Op("B", s, b), *weights]
        own += forward + turn if forward_first else turn + forward
    return own + [Op("W", s, m) for m in range(max(microbatches - back, 0), microbatches)]


def zbv(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Two chunks a rank, down the ranks and up again (Qi et al. 2024, section 6): the memory of 1F1B and,
    where F, B and W take alike, no bubble between a rank's first and last op.

    Raises
    ------
    ScheduleError
        With fewer than ``2 ranks - 1`` microbatches, or other than 2 chunks.
    """
    two_chunks("zbv", ranks, microbatches, chunks, 2 * ranks - 1)
    orders = []
    for p in range(ranks):
        down, up, n = p, 2 * ranks - 1 - p, ranks - p
        turns = _Turns(microbatches)
        turns.add(2 * n - 1, ("F", down))
        turns.add(p, ("F", up), ("F", down))
        turns.add(n, ("F", up), ("B", up), ("W", up))
        steady = [("F", down), ("B", down), ("W", down), ("F", up), ("B", up), ("W", up)]
        while turns.left("F", up) or turns.left("F", down):
            turns.add(1, *steady)
        turns.add(p, ("B", down), ("B", up))
        turns.add(n, ("B", down), ("W", down))
        turns.add(turns.left("W", up), ("W", up))
        turns.add(turns.left("W", down), ("W", down))
        orders.append(turns.ops)
    return Schedule(tuple(map(tuple, orders)), (v_shape(ranks),))


class _Turns:
    """A rank's list: each kind of op of each stage takes its microbatches in order."""

    def __init__(self, microbatches: int) -> None:
        self.ops: list[Op] = []
        self._microbatches, self._next = microbatches, {}

    def left(self, kind: str, stage: int) -> int:
        """Microbatches that have not had their turn."""
        return self._microbatches - self._next.get((kind, stage), 0)

    def add(self, times: int, *ops: tuple[str, int]) -> None:
        """Take each of `ops` in turn, so many times; none beyond the last microbatch."""
        for kind, stage in ops * times:
            if self.left(kind, stage):
                m = self._microbatches - self.left(kind, stage)
                self.ops.append(Op(kind, stage, m))
                self._next[kind, stage] = m + 1


def v_shape(ranks: int) -> tuple[int, ...]:
    """Virtual stages down the ranks and up again."""
    return (*range(ranks), *reversed(range(ranks)))


def _linear(orders: list[list[Op]]) -> Schedule:
    return Schedule(tuple(map(tuple, orders)), (tuple(range(len(orders))),))


def _positive(ranks: int, microbatches: int) -> None:
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(
            f"needs at least 1 rank and 1 microbatch, got {ranks} and {microbatches}"
        )


def _plain(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    _positive(ranks, microbatches)
    if chunks != 1:
        raise ScheduleError(f"{name} has 1 chunk a rank, got {chunks}; interleaved takes more")


def two_chunks(name: str, ranks: int, microbatches: int, chunks: int, least: int) -> None:
    _positive(ranks, microbatches)
    if chunks != 2:
        raise ScheduleError(f"{name} has 2 chunks a rank, got {chunks}")
    if microbatches < least:
        raise ScheduleError(
            f"{name} over {ranks} ranks needs at least {least} microbatches, got {microbatches}"
        )
