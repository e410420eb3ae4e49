"""Formats other than profiler JSON, and what a trace says before any simulation."""

from __future__ import annotations

import gzip
import json
import struct

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from kineto_files import two_ranks

import prism
from prism import chrome_trace, traces
from prism.model.coupling import Coupling
from prism.model.dag_builder import DagBuilder
from prism.model.engine.montecarlo import propagate
from prism.model.pools import Empirical, LogNormal
from prism.model.signature import PoolKey, Signature
from prism.model.step_model import StepModel
from prism.traces import TraceError, TraceWarning, build_graph, observe, read_trace, replay

# a plain table


def table(steps: int = 30, seed: int = 0) -> pd.DataFrame:
    """Two ranks compute, meet and compute again; the second stream of rank 0 runs beside."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(steps):
        a, b, side = rng.gamma(100, 0.01, 3)
        meet, last = max(a, b) + 0.5, rng.gamma(100, 0.01, 2)
        rows += [
            (0, step, "work", 0.0, a, "", "main"), (1, step, "work", 0.0, b, "", "main"),
            (0, step, "copy", 0.0, side, "", "copies"),
            (0, step, "sum", a, meet - a, "0;1", "main"), (1, step, "sum", b, meet - b, "0;1", "main"),
            (0, step, "rest", meet, last[0], "", "main"), (1, step, "rest", meet, last[1], "", "main"),
        ]  # fmt: skip
    names = ["rank", "step", "op", "start", "duration", "group", "stream"]
    return pd.DataFrame(rows, columns=names)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_a_plain_table_gives_graph_pools_and_replay(tmp_path, suffix):
    path = tmp_path / f"job{suffix}"
    frame = table().sample(frac=1, random_state=0)
    frame.to_parquet(path) if suffix == ".parquet" else frame.to_csv(path, index=False)
    trace = read_trace(path)
    graph = build_graph(trace)
    observed = observe(trace, graph)
    assert graph.dag.n_ops == 6
    meet = graph.op_of_record[trace["name"].values == "sum"]
    assert meet[0] == meet[1] and np.allclose(observed.duration[:, meet[0]], 0.5)
    assert np.max(np.abs(replay(observed, gaps=False).relative_error)) < 1e-12
    runs = prism.simulate(prism.model_from_trace(trace), 2000)
    measured = observed.step_time.values
    assert abs(np.median(runs.step_time) / np.median(measured) - 1) < 0.03


def test_ranks_in_files_of_their_own(tmp_path):
    frame = table()
    for rank, own in frame.groupby("rank"):
        own.to_csv(tmp_path / f"rank{rank}.csv", index=False)
    frame.to_csv(tmp_path / "all.csv", index=False)
    one = read_trace(tmp_path / "all.csv")
    many = read_trace([tmp_path / "rank0.csv", tmp_path / "rank1.csv"])
    assert np.array_equal(one["start"], many["start"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="start"), "columns start are missing"),
        (lambda t: t.assign(duration=np.nan), "duration must be a number"),
        (lambda t: t.assign(rank=0.5), "rank must be a whole number"),
        (lambda t: t.iloc[:-1], "is present in 29 of 30 steps"),
        (lambda t: t.assign(group=t["group"].where(t["group"] == "", "0-1")), "no list of ranks"),
        (lambda t: t.assign(group=t["group"].where(t["group"] == "", "0;5")), "on rank 1"),
        (lambda t: t.assign(group=""), "communicates with none of the others"),
        (lambda t: t.assign(role="magic"), "role 'magic' is not one of"),
        (lambda t: t.assign(op=""), "op is empty"),
        (lambda t: t.assign(start=1e300), "start goes beyond"),
        (lambda t: t.assign(stage=10**10), "stage goes beyond"),
        (
            lambda t: t[(t["op"] != "sum") | (t["rank"] == 0)],
            "number 0 of ranks 0,1 .sum.: rank 1 does not",
        ),
        (
            lambda t: t.assign(op=t["op"].where((t["op"] != "sum") | (t["rank"] == 0), "other")),
            "is other on one rank and sum on another",
        ),
    ],
)
def test_damaged_tables_are_refused_in_one_line(tmp_path, change, message):
    change(table()).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(TraceError, match=message) as refused:
        build_graph(read_trace(tmp_path / "t.csv"))
    assert "\n" not in str(refused.value)


def test_a_step_that_is_in_two_files_is_refused(tmp_path):
    frame = table(3)
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame[frame["rank"] == 0].to_csv(tmp_path / "b.csv", index=False)
    with pytest.raises(TraceError, match="step 0 of rank 0 is also in"):
        read_trace(tmp_path)


# Chakra


def protobuf(nodes: list[dict]) -> bytes:
    """Length-delimited messages by hand: metadata, then nodes."""

    def number(n: int) -> bytes:
        out = b""
        while n > 0x7F:
            out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
        return out + bytes([n])

    def field(key: int, value: int | bytes) -> bytes:
        if isinstance(value, int):
            return number(key << 3) + number(value)
        return number(key << 3 | 2) + number(len(value)) + value

    def attribute(name: str, value: int) -> bytes:
        return field(10, field(1, name.encode()) + field(27 if name == "is_cpu_op" else 9, value))

    metadata = field(1, b"0.0.4")
    text = number(len(metadata)) + metadata
    for n in nodes:
        message = field(1, n["id"]) + field(2, n["name"].encode()) + field(3, n["type"])
        message += field(5, b"".join(map(number, n["deps"]))) if n["deps"] else b""
        message += field(7, n["us"])
        message += attribute("is_cpu_op", 0) + attribute("comm_type", n.get("kind", 0))
        # a fixed64 and a float that no reader needs
        message += number(40 << 3 | 1) + struct.pack("<d", 1.5) + number(41 << 3 | 5) + b"\0\0\0\0"
        text += number(len(message)) + message
    return text


def chakra_nodes(work: int) -> list[dict]:
    return [
        {"id": 1, "name": "forward", "type": 4, "deps": [], "us": work},
        {"id": 2, "name": "sum", "type": 7, "deps": [1], "us": 20, "kind": 0},
        {"id": 300, "name": "update", "type": 4, "deps": [2], "us": 5},
    ]


def test_chakra_protobuf_of_two_ranks(tmp_path):
    for rank, work in enumerate((30, 500)):
        (tmp_path / f"job.{rank}.et").write_bytes(protobuf(chakra_nodes(work)))
    with pytest.warns(TraceWarning, match="computed from the graph and not measured"):
        trace = read_trace(tmp_path)
    graph = build_graph(trace)
    observed = observe(trace, graph)
    assert graph.dag.n_ops == 5
    _, finish = propagate(graph.dag, observed.duration.values.T)
    assert finish.max() == pytest.approx(525e-6)
    # the step time that is reported is that of the graph, rendezvous and all
    assert float(observed.step_time[0]) == pytest.approx(525e-6)


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
def test_chakra_json_and_protobuf_say_the_same(tmp_path):
    nodes = chakra_nodes(30)
    (tmp_path / "a.0.et").write_bytes(protobuf(nodes))
    graph = [{"Id": n["id"], "Name": n["name"], "NodeType": n["type"], "data_deps": n["deps"],
              "runtime": n["us"], "is_cpu_op": False, "comm_type": 0} for n in nodes]  # fmt: skip
    (tmp_path / "b.0.json").write_text(json.dumps({"workload_graph": graph}))
    a, b = read_trace(tmp_path / "a.0.et"), read_trace(tmp_path / "b.0.json")
    assert np.array_equal(a["start"], b["start"]) and np.array_equal(a["duration"], b["duration"])
    assert a["role"].values.tolist() == b["role"].values.tolist() == ["compute", "world", "compute"]


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
def test_real_chakra_files(prism_data):
    folder = prism_data / "traces"
    trace = read_trace(folder / "chakra/chakra.0.workload_graph.json.gz")
    assert trace.sizes["op"] == 3664
    # five all-reduces and two broadcasts on the device; those of the host only launch them
    assert (trace["role"].values == "world").sum() == 7
    for path, message in (
        ("chakra/feeder_chakra.0.et.gz", "dependencies form a cycle"),
        ("astra_sim/all_reduce.0.et", "no durations"),
        ("chakra/pytorch_et_1.0.2-chakra.0.0.4.json.gz", "an execution trace holds no times"),
    ):
        with pytest.raises(TraceError, match=message):
            read_trace(folder / path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-3], "goes beyond the end"),
        (lambda b: b"\xff" * 20, "does not end"),
        (lambda b: b"", "empty file"),
        (lambda b: gzip.compress(b)[:-9], "truncated"),
    ],
)
def test_damaged_protobuf_is_refused(tmp_path, damage, message):
    path = tmp_path / "x.0.et"
    path.write_bytes(damage(protobuf(chakra_nodes(30))))
    with pytest.raises(TraceError, match=message):
        read_trace(path)


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
def test_chakra_ranks_that_do_not_match_are_refused(tmp_path):
    (tmp_path / "a.0.et").write_bytes(protobuf(chakra_nodes(30)))
    (tmp_path / "a.1.et").write_bytes(protobuf(chakra_nodes(30)[:1]))
    with pytest.raises(TraceError, match="rank 0 has 1 collectives, rank 1 has 0"):
        read_trace(tmp_path)


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
@pytest.mark.parametrize(
    ("change", "message"),
    [({"kind": 2}, "collective 0 is all_gather on rank 0 and all_reduce on rank 1"),
     ({"type": 5}, "sends and receives are not read")],
)  # fmt: skip
def test_chakra_that_cannot_be_joined_is_refused(tmp_path, change, message):
    nodes = chakra_nodes(30)
    (tmp_path / "a.1.et").write_bytes(protobuf(nodes))
    nodes[1] |= change
    (tmp_path / "a.0.et").write_bytes(protobuf(nodes))
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path)


# before any simulation


def test_breakdown_against_known_times(tmp_path):
    found = prism.breakdown(read_trace(two_ranks(tmp_path)))
    busy, exposed = found.busy_quantile, found.exposed_quantile
    reduce = "all_reduce (world)"
    us = 1e-6
    assert float(busy.sel(kind=reduce, quantile=0.5)) == pytest.approx(20 * us)
    # rank 0 waits 20 us more, in no time covered by compute
    assert float(exposed.sel(kind=reduce, quantile=0.95)) == pytest.approx(40 * us, rel=0.05)
    waiting = found.waiting_quantile.sel(kind=reduce, quantile=0.5)
    assert float(waiting) == pytest.approx(10 * us)
    assert float(busy.sel(kind="compute", quantile=0.5)) == pytest.approx(50 * us)
    # 40 and 60 us of compute on the two ranks
    assert float(found.rank_cv) == pytest.approx(0.2)
    assert float(found.step_time_quantile.sel(quantile=0.95)) == pytest.approx(200 * us)


def test_breakdown_of_a_real_trace(straggler_trace):
    found = prism.breakdown(read_trace(straggler_trace))
    assert np.all(found.busy_quantile.diff("quantile") >= 0)
    assert np.all(found.exposed_quantile.sel(quantile=0.5) >= 0)
    # collectives wait far longer than they transfer
    assert found.waiting_quantile.sel(quantile=0.95).max() > 0.1
    assert traces.extra_days(found, 54.0) == pytest.approx(54 * float(found.extra_share))
    with pytest.raises(ValueError, match="run_days must be positive"):
        traces.extra_days(found, 0)


def test_breakdown_counts_only_ranks_that_take_part(tmp_path):
    """A collective of two ranks of four that always takes the same: it varies by nothing."""
    rows = [(r, s, "work", 0.0, 1.0, "") for r in range(4) for s in range(3)]
    rows += [(r, s, "sum", 1.0, 0.5, "0;1") for r in (0, 1) for s in range(3)]
    rows += [(r, s, "all", 1.5, 0.5, "0;1;2;3") for r in range(4) for s in range(3)]
    frame = pd.DataFrame(rows, columns=["rank", "step", "op", "start", "duration", "group"])
    frame.to_csv(tmp_path / "t.csv", index=False)
    found = prism.breakdown(read_trace(tmp_path / "t.csv"))
    assert found.busy_quantile.sel(kind="sum (group)").values.tolist() == [0.5, 0.5, 0.5]
    assert float(found.extra_share) == 0.0


def test_side_by_side_says_where_steps_are_too_few(tmp_path):
    slow = table(5, seed=2)
    slow.loc[slow["op"] == "rest", "duration"] *= 2
    for name, frame in (("a", table(5, seed=1)), ("b", slow)):
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    a, b = (read_trace(tmp_path / f"{n}.csv") for n in "ab")
    found = traces.compare_traces(a, b)
    assert np.all(np.isnan(found.p_value)) and not found.moved.any()


def test_side_by_side_finds_what_moved_and_only_that(tmp_path):
    before, after = table(40, seed=1), table(40, seed=2)
    slow = after["op"] == "rest"
    after.loc[slow, "duration"] *= 1.5
    for name, frame in (("a", before), ("b", after), ("c", table(40, seed=3))):
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    a, b, c = (read_trace(tmp_path / f"{n}.csv") for n in "abc")
    moved = traces.compare_traces(a, b)
    assert moved.signature.values[moved.moved.values].tolist() == ["rest"]
    assert float(moved.median_ratio.sel(signature="rest")) == pytest.approx(1.5, rel=0.05)
    same = traces.compare_traces(a, c)
    assert not same.moved.any()
    assert float(same.std_ratio.sel(kind="compute")) == pytest.approx(1.0, abs=0.3)
    with pytest.raises(ValueError, match="no signature in common"):
        traces.compare_traces(a, read_trace(two_ranks(tmp_path)))


# out again


def small_model(coupling=None) -> StepModel:
    b = DagBuilder()
    first = [b.add(Signature("work"), [r]) for r in (0, 1)]
    meet = b.add(Signature("sum", role="dp", scope="intra_node"), [0, 1], after=first)
    for r in (0, 1):
        b.add(Signature("rest"), [r], after=[meet])
    pools = {PoolKey(Signature("work")): LogNormal(-3.0, 0.3), PoolKey(Signature("rest")): Empirical((0.1, 0.2)),
             PoolKey(Signature("sum", role="dp", scope="intra_node")): LogNormal(-4.0, 0.1)}  # fmt: skip
    return StepModel(b.build([0, 0]), pools, coupling or Coupling.independent())


def test_a_draw_as_a_chrome_trace_is_that_draw(tmp_path):
    model = small_model()
    runs = prism.simulate(model, 200, seed=3)
    draw = chrome_trace.draw_at(runs, 0.95)
    path = chrome_trace.write_chrome_trace(model, tmp_path / "p95.json.gz", draw, seed=3)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    done = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in done) == pytest.approx(1e6 * float(runs.step_time[draw]))
    assert {e["pid"] for e in done} == {0, 1}
    critical = [e for e in done if e["args"]["critical"]]
    # a path: one work, the sum on both its members, one rest
    assert sorted(e["name"] for e in critical) == ["rest", "sum", "sum", "work"]
    share = np.mean(runs.step_time <= runs.step_time[draw])
    assert 0.94 < float(share) < 0.96
    assert (
        path.read_bytes() == chrome_trace.write_chrome_trace(model, path, draw, seed=3).read_bytes()
    )
    assert [p.name for p in tmp_path.iterdir()] == ["p95.json.gz"]


def test_slices_of_one_thread_never_overlap_in_part():
    b = DagBuilder()
    for i in range(6):
        b.add(Signature(f"k{i}"), [0])
    model = StepModel(
        b.build([0]), {PoolKey(Signature(f"k{i}")): LogNormal(-3.0, 1.0) for i in range(6)}
    )
    done = [e for e in chrome_trace.chrome_trace(model, 3)["traceEvents"] if e["ph"] == "X"]
    for a in done:
        for other in done:
            if a is not other and a["tid"] == other["tid"]:
                assert a["ts"] + a["dur"] <= other["ts"] or other["ts"] + other["dur"] <= a["ts"]
    assert len({e["tid"] for e in done}) == 6


def test_chrome_traces_refuse_what_they_cannot_show():
    with pytest.raises(ValueError, match="draw must not be negative"):
        chrome_trace.chrome_trace(small_model(), -1)
    with pytest.raises(ValueError, match="q must lie in"):
        chrome_trace.draw_at(xr.Dataset({"step_time": ("draw", [1.0])}), 2.0)
    with pytest.raises(ValueError, match="not several jobs"):
        chrome_trace.draw_at(prism.simulate(small_model(), 3, jobs=2), 0.5)


# recording


def test_recording_without_torch_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(ImportError, match="recording needs torch"), traces.record(tmp_path):
        pass


def test_recording_refuses_no_steps(tmp_path):
    with (
        pytest.raises(ValueError, match="steps must be at least 1"),
        traces.record(tmp_path, steps=0),
    ):
        pass
