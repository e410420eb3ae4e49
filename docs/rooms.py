"""Draw the rooms of the package from its imports: ``python docs/rooms.py`` renews docs/architecture.md.

An arrow from one room to another counts the imports of its files; arrows that follow from others are left out.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import grimp
import networkx as nx

PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- rooms: begin -->\n", "<!-- rooms: end -->"


def imports_between_rooms() -> Counter:
    """Number of imports from each room to each other one."""
    graph = grimp.build_graph("prism")
    found: Counter = Counter()
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            pair = tuple(name.split(".")[1] if "." in name else "" for name in (module, other))
            if all(pair) and pair[0] != pair[1]:
                found[pair] += 1
    return found


def picture(found: Counter) -> str:
    """The rooms as a Mermaid graph."""
    edges = nx.transitive_reduction(nx.DiGraph(list(found))).edges
    lines = [f"    {a} -->|{found[a, b]}| {b}" for a, b in sorted(edges)]
    return "\n".join(["```mermaid", "graph TD", *lines, "```", ""])


def page(text: str) -> str:
    """The page with its picture renewed."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + picture(imports_between_rooms()) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
