"""The training bench really trains, in every layout the same model, and its tables read as a graph."""

from __future__ import annotations

import numpy as np
import pytest

import prism
from prism import traces
from prism.cli import main
from prism.measure.bench import Layout, TrainingError, record_training, training

TINY = {"layers": 2, "width": 16, "heads": 4, "tokens": 8, "batch": 2}


def test_ranks_and_places_are_each_others_inverse_invariant():
    layout = Layout(dp=2, tp=2, pp=3, microbatches=3, layers=3)
    assert [layout.rank(*layout.place(r)) for r in range(layout.ranks)] == list(range(12))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp": 3}, "heads 4 does not divide by tp 3"),
        ({"pp": 3}, "layers 4 does not divide by pp 3"),
        ({"pp": 4, "microbatches": 2}, "needs at least as many microbatches, got 2"),
        ({"dp": 0}, "dp must be at least 1, got 0"),
    ],
)
def test_layouts_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Layout(**given)


def test_bad_arguments_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="condition 'hot' is not one of steady"):
        record_training(tmp_path / "a", condition="hot")
    with pytest.raises(ValueError, match="steps must be at least 1"):
        record_training(tmp_path / "a", steps=0)
    assert not (tmp_path / "a").exists()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Eight ranks over all three kinds of parallelism, and one rank that does it all."""
    pytest.importorskip("torch", reason="training needs torch")
    folder = tmp_path_factory.mktemp("training")
    for name, layout in {
        "alone": Layout(pp=1, microbatches=4, **TINY),
        "spread": Layout(dp=2, tp=2, pp=2, microbatches=2, **TINY),
    }.items():
        record_training(folder / name, layout, steps=30, skip=0, timeout=300)
    return folder


def test_every_layout_trains_the_same_model(recorded):
    """Same data, same weights: split over 8 ranks the losses are those of one rank, and they fall."""
    alone, spread = (np.loadtxt(recorded / name / "loss.txt") for name in ("alone", "spread"))
    np.testing.assert_allclose(spread, alone, rtol=2e-4)
    assert alone[-5:].mean() < alone[:5].mean() - 0.05


def test_the_tables_explain_the_steps(recorded):
    trace = prism.read_trace(recorded / "spread")
    graph = traces.build_graph(trace)
    observed = traces.observe(trace, graph)
    roles = {s.role for s in graph.dag.signatures}
    assert roles == {"compute", "tp", "pp", "dp", "world"}
    # an exchange of the pipeline is one op of two ranks, an all-reduce one of its group
    members = np.diff(graph.dag.member_ptr)
    role = np.array([s.role for s in graph.dag.signatures])[graph.dag.signature]
    assert {r: set(members[role == r].tolist()) for r in roles} == {
        "compute": {1}, "tp": {2}, "pp": {2}, "dp": {2}, "world": {8},
    }  # fmt: skip
    # eight processes share the cores of this machine: how late they wake is not the graph's to explain
    whole = traces.replay(observed)
    assert float(whole["relative_error"].min()) > -1e-6


def test_a_rank_that_fails_stops_the_others_and_leaves_nothing(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="training needs torch")
    start = training._start
    monkeypatch.setattr(
        training, "_start", lambda job, rank, meet: start(job | ({"layout": {"dp": -1}} if rank else {}), rank, meet)
    )  # fmt: skip
    with pytest.raises(TrainingError, match=r"rank 1 failed: .*dp must be at least 1"):
        record_training(tmp_path / "out", Layout(**TINY), steps=3, timeout=120)
    assert not any((tmp_path / "out").iterdir())


def test_the_command_records_and_says_so(tmp_path, capsys):
    pytest.importorskip("torch", reason="training needs torch")
    sizes = [a for k, v in TINY.items() for a in (f"--{k}", str(v))]
    out = tmp_path / "run"
    assert main.main(["bench", "training", str(out), "--steps", "25", "--skip", "2", *sizes]) == 0
    assert "25 steps of 2 ranks" in capsys.readouterr().out
    assert main.main(["simulate", str(out), "--draws", "200"]) == 0
    assert "95 % of simulated steps stay under" in capsys.readouterr().out


def test_bad_layouts_are_one_line_on_the_command_line(tmp_path, capsys):
    assert main.main(["bench", "training", str(tmp_path / "x"), "--tp", "3"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "does not divide" in said
