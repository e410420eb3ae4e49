"""Source-only copies of the notebooks, which the stages depend on.

A notebook changes on disk whenever it is run and saved in JupyterLab. The copies hold the code cells
and their tags only, so saving outputs, or editing text, runs no stage anew.
"""

from __future__ import annotations

from pathlib import Path

import nbformat

from prism import study


def source_only(notebook: nbformat.NotebookNode) -> str:
    """Code cells as text, each under a line with its sorted tags."""
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    return "\n\n".join(
        f"# %% {' '.join(sorted(c.metadata.get('tags', [])))}".rstrip() + "\n" + c.source.strip()
        for c in cells
    ) + "\n"  # fmt: skip


def main() -> None:
    target = study.path("build/src")
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(study.path("notebooks")).glob("*.ipynb")):
        text = source_only(nbformat.read(file, as_version=4))
        (target / file.with_suffix(".py").name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
