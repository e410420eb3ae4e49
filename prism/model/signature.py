"""Signatures of operations, and the keys of their duration pools."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace


class Category(enum.IntEnum):
    """Category of an op, which decides the granularity of its pool.

    A compute op varies by rank, a collective by process group, a point-to-point transfer by
    link. ``GAP`` is idle time kept as an op of its own.
    """

    COMPUTE = 0
    COLLECTIVE = 1
    POINT_TO_POINT = 2
    GAP = 3


#: roles of process groups; ``embedding`` ties the first and the last pipeline stage, ``world``
#: every rank, ``group`` is one of which no more is known. ``pp`` is the traffic between stages.
#: ``host`` is work of the CPU that launches
ROLES = ("compute", "tp", "pp", "dp", "cp", "ep", "embedding", "world", "gap", "group", "host")


@dataclass(frozen=True, order=True)
class Signature:
    """The identity of an operation: ops with equal signatures do the same work.

    Attributes
    ----------
    op : str
        Name, for instance ``forward-compute`` or ``all_reduce``.
    shape : str
        Shapes or bytes; where a source has none, what decides the amount of work (the stage).
    dtype : str
    role : str
        The role of its process group, one of `ROLES`; ``compute`` or ``host`` for local work.
    scope : str
        ``local``, ``intra_node`` or ``inter_node``.

    Examples
    --------
    >>> Signature("send", "4MiB", "bf16", "pp", "inter_node").category.name
    'POINT_TO_POINT'
    """

    op: str
    shape: str = ""
    dtype: str = ""
    role: str = "compute"
    scope: str = "local"

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} of {self.op!r} is not one of {', '.join(ROLES)}")

    @property
    def category(self) -> Category:
        """Category that follows from the role: only pipeline traffic is point-to-point."""
        if self.role in ("compute", "host"):
            return Category.COMPUTE
        if self.role == "gap":
            return Category.GAP
        return Category.POINT_TO_POINT if self.role == "pp" else Category.COLLECTIVE

    @property
    def component(self) -> str:
        """Component of a step that the op belongs to: ``compute``, ``host``, ``gap``, or the role of its group.

        Components are a partition of all ops, and the same words in `simulate`, `ablate`, `Frozen` and `budget`.
        """
        return self.role

    @property
    def coupling_class(self) -> str:
        """Class whose shared scores the op loads: classes are independent of each other.

        Examples
        --------
        >>> Signature("all_reduce", role="dp", scope="inter_node").coupling_class
        'inter_node'
        """
        match self.category:
            case Category.COMPUTE:
                return self.role  # the device's work, or the host's
            case Category.GAP:
                return "gap"
            case _:
                return "inter_node" if self.scope == "inter_node" else "intra_node"

    def __str__(self) -> str:
        parts = [self.op, self.shape, self.dtype]
        parts += [] if self.category == Category.COMPUTE else [self.role, self.scope]
        return " ".join(p for p in parts if p)


@dataclass(frozen=True, order=True)
class PoolKey:
    """Key of a duration pool: what is done, where, and at which place in the step.

    An empty `site` means every site, a `position` of -1 every position. `parents` gives the
    order in which a pool borrows: first any position, then any site.

    Examples
    --------
    >>> key = PoolKey(Signature("forward-compute"), "rank 3", 0)
    >>> [(k.site, k.position) for k in key.parents()]
    [('rank 3', -1), ('', -1)]
    """

    signature: Signature
    site: str = ""
    position: int = -1

    def parents(self) -> Iterator[PoolKey]:
        """Coarser keys, nearest first."""
        if self.position != -1:
            yield replace(self, position=-1)
        if self.site:
            yield replace(self, site="", position=-1)

    @property
    def fleet(self) -> PoolKey:
        """The coarsest key: this signature wherever it runs."""
        return PoolKey(self.signature)

    def __str__(self) -> str:
        where = f" @ {self.site}" if self.site else ""
        return f"{self.signature}{where}" + (f" #{self.position}" if self.position >= 0 else "")


def stable_hash(*parts: object) -> int:
    """A 64-bit number that depends on `parts` alone: not on the process, platform or order
    of creation. The random identity of an op.

    Examples
    --------
    >>> stable_hash("forward", 3) == stable_hash("forward", 3) != stable_hash("forward", 4)
    True
    """
    text = "\x1f".join(str(p) for p in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
