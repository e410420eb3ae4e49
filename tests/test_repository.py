"""What holds for the repository as a whole."""

from __future__ import annotations

import json
import re
import subprocess

import nbformat
import pytest
import yaml
from ruamel.yaml import YAML

from pipelines.canon import source_only


@pytest.fixture(scope="module")
def notebooks(root):
    found = sorted((root / "notebooks").glob("*.ipynb"))
    assert found
    return {f: nbformat.read(f, as_version=4) for f in found}


@pytest.fixture(scope="module")
def stages(root):
    return YAML(typ="safe").load((root / "dvc.yaml").read_text())["stages"]


def test_notebooks_carry_no_outputs_and_one_kernel(notebooks):
    for file, notebook in notebooks.items():
        assert notebook.metadata.kernelspec.name == "python3", file.name
        for cell in notebook.cells:
            assert not cell.get("outputs"), file.name
            assert cell.get("execution_count") is None, file.name


def test_notebooks_have_one_parameters_cell_and_define_nothing(notebooks):
    for file, notebook in notebooks.items():
        tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
        assert len(tagged) == 1, file.name
        for cell in notebook.cells:
            if cell.cell_type == "code":
                assert not re.search(r"^\s*(def|class) ", cell.source, re.M), file.name


def test_stages_are_handed_exactly_what_they_declare(stages, notebooks):
    by_name = {f"notebooks/{f.name}": n for f, n in notebooks.items()}
    seen = set()
    for name, stage in stages.items():
        if name == "sources":
            continue
        words = stage["cmd"].split()
        handed = words[words.index("--params") + 1].split(",")
        assert handed == stage["params"], name
        file = words[words.index("pipelines.run") + 1]
        seen.add(file)
        parameters = next(
            c.source for c in by_name[file].cells if "parameters" in c.metadata.get("tags", [])
        )
        declared = set(re.findall(r"^(\w+) = ", parameters, re.M))
        paths = {words[i + 1] for i, w in enumerate(words) if w == "-p"}
        assert set(handed) | paths <= declared, name
        produced = {next(iter(o)) for o in [*stage["outs"], *stage["metrics"]]}
        assert all(next(iter(o.values())) == {"persist": True} for o in stage["outs"]), name
        for i, w in enumerate(words):
            if w == "-p" and words[i + 1].endswith("out"):
                assert f"{words[i + 2]}.nc" in produced, name
            elif w == "-p":
                assert words[i + 2] in stage["deps"], name
    assert seen == set(by_name)


def test_smoke_parameters_name_the_same_keys_as_the_real_ones(root, notebooks, stages):
    params = YAML(typ="safe").load((root / "params.yaml").read_text())
    for file, notebook in notebooks.items():
        source = next(
            c.source for c in notebook.cells if "parameters" in c.metadata.get("tags", [])
        )
        values: dict = {}
        exec(source, values)
        for block, content in params.items():
            if block in values and isinstance(content, dict):
                assert set(values[block]) == set(content), f"{file.name}: {block}"


def test_params_mean_the_same_to_both_yaml_dialects(root):
    text = (root / "params.yaml").read_text()
    assert yaml.safe_load(text) == YAML(typ="safe").load(text)


def test_saving_outputs_does_not_change_the_source(notebooks):
    notebook = next(iter(notebooks.values()))
    run = nbformat.from_dict(json.loads(json.dumps(notebook)))
    for i, cell in enumerate(c for c in run.cells if c.cell_type == "code"):
        cell.execution_count = i
        cell.outputs = [nbformat.v4.new_output("stream", text="x")]
        cell.metadata["tags"] = cell.metadata.get("tags", [])
    run.cells.append(nbformat.v4.new_markdown_cell("a remark"))
    assert source_only(run) == source_only(notebook)
    run.cells.append(nbformat.v4.new_code_cell("1 + 1"))
    assert source_only(run) != source_only(notebook)


def test_no_committed_file_names_a_registry_or_this_machine(root):
    files = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    names = "|".join(["py" + "pi.org", "python" + "hosted", "npm" + "js.org", "conda" + ".io"])
    pattern = re.compile(rf"{names}|(?<![\w.])/(?:home|root|work)/\w")
    for name in files:
        text = (root / name).read_bytes().decode("utf-8", errors="ignore")
        assert not pattern.search(text), f"{name}: {pattern.search(text)}"
    assert "://" not in (root / "constraints.txt").read_text()


def test_public_names_exist_and_are_documented():
    import prism

    for name in prism.__all__:
        doc = getattr(prism, name).__doc__
        # a dataclass without a docstring gets its signature for one
        assert doc and not doc.startswith(f"{name}("), name


def test_made_by_names_functions_that_exist(root):
    import functools

    import prism

    found = {}
    for file in sorted((root / "prism").rglob("*.py")):
        for name in re.findall(r'made_by(?:=|": )"(prism\.[\w.]+)"', file.read_text()):
            found[name] = file
    assert len(found) > 40
    for name, file in found.items():
        try:
            made = functools.reduce(getattr, name.split(".")[1:], prism)
        except AttributeError:
            pytest.fail(f"{file}: made_by {name} does not exist")
        assert callable(made) or made.__name__ == "prism.chrome_trace", name


def test_one_file_writes_results_under_a_temporary_name(root):
    renaming = {
        f.relative_to(root).as_posix()
        for f in (root / "prism").rglob("*.py")
        if re.search(r"\bpart\.replace\(|os\.rename|os\.replace", f.read_text())
    }
    assert renaming == {"prism/base/files.py"}


def test_the_picture_of_the_rooms_is_drawn_from_the_imports(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "docs"))
    import rooms

    text = rooms.PAGE.read_text("utf-8")
    assert rooms.page(text) == text, "run: python docs/rooms.py"
    import networkx as nx

    assert nx.is_directed_acyclic_graph(nx.DiGraph(list(rooms.imports_between_rooms())))


def test_names_in_the_readme_exist(root):
    import importlib

    import prism

    text = (root / "README.md").read_text("utf-8")
    seen = set()
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        rooms = {"prism": prism}
        for package, names in re.findall(r"^from (prism[\w.]*) import ([\w, ]+)$", block, re.M):
            for name in names.split(", "):
                parent = importlib.import_module(package)
                exported = name in parent.__all__
                rooms[name] = (
                    getattr(parent, name)
                    if exported
                    else importlib.import_module(f"{package}.{name}")
                )
        for room, name in re.findall(r"(?<![\w.])(\w+)\.(\w+)\b", block):
            if room in rooms:
                assert hasattr(rooms[room], name), f"README: {room}.{name}"
                seen.add((room, name))
    assert len(seen) > 40


def test_no_file_is_named_after_a_function_that_its_package_exports(root):
    for stub in (root / "prism").rglob("__init__.pyi"):
        names = set(re.findall(r"(\w+) as \1", stub.read_text()))
        files = {f.stem for f in stub.parent.glob("*.py")} - {"__init__"}
        submodules = set(re.findall(r"from \. import \(?\s*(\w+)", stub.read_text()))
        assert not (names & files) - submodules - {"schema", "specs", "tables", "telemetry"}, stub
