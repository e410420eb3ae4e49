"""The study: root, parameters, files that are whole or not there."""

from __future__ import annotations

import json
import shutil

import matplotlib
import numpy as np
import pytest

from prism import plots, study
from prism.base import schema
from prism.base.schema import SchemaError
from prism.base.specs import SpecError

matplotlib.use("agg")


@pytest.fixture
def folder(root, tmp_path, monkeypatch):
    """A study of its own."""
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(root / name, tmp_path)
    monkeypatch.delenv("PRISM_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_root_from_anywhere_inside(folder, monkeypatch):
    inner = folder / "notebooks" / "deeper"
    inner.mkdir(parents=True)
    for place in (folder, inner.parent, inner):
        monkeypatch.chdir(place)
        assert study.root() == folder


def test_no_study_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("PRISM_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="not inside a PRISM study"):
        study.root()


def edit(folder, old, new):
    text = (folder / "params.yaml").read_text()
    assert old in text
    (folder / "params.yaml").write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("draws: 1000", "draws: 71"), r"montecarlo.draws: .*greater than or equal to 72.*got 71"),
        (("draws: 1000", "draws: many"), r"montecarlo.draws: .*integer.*got 'many'"),
        (("draws: 1000", "drawz: 1000"), "montecarlo.drawz: Extra inputs"),
        (("at: 0.95", "at: 95"), "hot_node.at"),
        (("seed: 0", "seed: yes"), r"seed: .*got 'yes'"),
        (("seed: 0", "seed: ["), "not valid YAML"),
        (("seed: 0", "seed: !!int abc"), "not valid YAML"),
        (("seed: 0", "seed: " + 3000 * "[" + 3000 * "]"), "not valid YAML"),
        (("# Parameters", "%YAML 1.1\n---\n# Parameters"), "YAML directives are not read"),
        (("round_s: 300.0", "round_s: .inf"), "scheduling.round_s: .*finite"),
    ],
)
def test_wrong_parameters_are_refused_in_one_line(folder, change, message):
    edit(folder, *change)
    with pytest.raises(SpecError, match=message) as fault:
        study.read_params()
    assert "\n" not in str(fault.value)


def test_parameters_are_yaml_1_2(folder):
    edit(folder, "at: 0.95", "at: 95e-2")
    assert study.read_params().hot_node.at == 0.95


def example():
    return schema.dataset(
        {"step_time": ("draw", np.linspace(1, 2, 50))}, made_by="test", source="synthetic"
    )


def save_all(stem):
    figure, ax = plots.column()
    plots.step_times(example(), ax)
    study.save(stem, example(), metrics={"p95": np.float64(1 / 3), "none": np.nan}, figure=figure)


def test_equal_results_give_equal_bytes(folder):
    for stem in ("a", "b"):
        save_all(stem)
    for suffix in (".nc", ".json", ".pdf", ".png"):
        assert (folder / f"a{suffix}").read_bytes() == (folder / f"b{suffix}").read_bytes(), suffix
    assert json.loads((folder / "a.json").read_text()) == {"p95": 0.3333333333, "none": None}


def test_what_fails_leaves_the_earlier_result(folder):
    save_all("out/a")
    before = {p.name: p.read_bytes() for p in (folder / "out").iterdir()}

    class Broken:
        def savefig(self, path, **kwargs):
            path.write_bytes(b"half")
            raise OSError("disk full")

    other = example() + 1
    other["step_time"].attrs = example()["step_time"].attrs
    other.attrs = example().attrs
    with pytest.raises(OSError, match="disk full"):
        study.save("out/a", other, metrics={"p95": 2.0}, figure=Broken())
    with pytest.raises(TypeError):
        study.save("out/a", other, metrics={"p95": object()})
    assert {p.name: p.read_bytes() for p in (folder / "out").iterdir()} == before


def test_messages_name_files_as_the_user_does(folder):
    with pytest.raises(ValueError, match=r"^data/none\.csv: no such file"):
        study.open_jobs("data/none.csv")


def in_milliseconds():
    ds = example()
    ds["step_time"].attrs["units"] = "ms"
    return ds


def test_a_ratio_of_seconds_is_not_seconds():
    """xarray would keep the units through the division; `schema.dataset` sets them."""
    ratio = example().step_time / 2.0
    assert ratio.units == "s"
    made = schema.dataset({"cv": ratio}, made_by="test", source="synthetic")
    assert made.cv.units == "1"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schema.dataset({"latency": ("draw", [1.0])}, made_by="t", source="measured"), "unknown variable: latency"),
        (lambda: schema.dataset({"step_time": ("iteration", [1.0])}, made_by="t", source="measured"), "unknown dimension: iteration"),
        (lambda: schema.dataset({"step_time": ("draw", [1.0])}, made_by="t", source="real"), "source must be one of"),
        (lambda: schema.check(in_milliseconds()), "step_time must have units 's'"),
    ],
)  # fmt: skip
def test_vocabulary_is_kept(make, message):
    with pytest.raises(SchemaError, match=message):
        make()
