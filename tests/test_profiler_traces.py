"""Profiler traces of several ranks: the join, the replay on real files, and what is refused."""

from __future__ import annotations

import gzip
import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kineto_files import collective, event, kernel, launch, step, two_ranks, write

import prism
from prism.traces import TraceError, TraceWarning, build_graph, observe, read_trace, replay

DLRM = "traces/param_dlrm_8rank"


# replay on real files


#: files, steps in them, and the largest error of a step without gaps (with gaps: 0.1 %)
REAL = {
    "DLRM, eight ranks": (DLRM, 1, 0.01),
    "HTA nccl_data": ("traces/hta/nccl_data.rank0of2.json.gz", 3, 0.001),
    "HTA df_index_resolver": ("traces/hta/df_index_resolver.rank1of2.json.gz", 5, 0.001),
    "TraceLens MI300": ("traces/tracelens/mi300_resnet_ddp.rank0of8.json.gz", 3, 0.021),
    "TraceLens MI210, device only": ("traces/tracelens/mi210_gpu_only.json.gz", 1, 0.01),
    "HTA MI250": ("traces/hta/mi250_minitoy_train_ROCm6_2_kineto.json.gz", 1, 0.01),
    "HTA alexnet": ("traces/hta/alexnet_cuda_sync.json.gz", 1, 0.01),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
def test_replay_returns_measured_step_times(prism_data, name):
    path, steps, without = REAL[name]
    trace = read_trace(prism_data / path)
    assert trace.sizes["step"] == steps
    graph = build_graph(trace)
    observed = observe(trace, graph)
    assert np.max(np.abs(replay(observed, graph.dag).relative_error)) < 0.001
    assert np.max(np.abs(replay(observed, graph.dag, gaps=False).relative_error)) < without


def test_replay_of_a_trace_that_lacks_kernels_says_what_it_lacks(prism_data):
    """negative_queue: kernels of CUDA graphs are not in the file, so a third of the step is explained."""
    with pytest.warns(TraceWarning) as said:
        trace = read_trace(prism_data / "traces/hta/negative_queue.rank0of16.json.gz")
    assert any(
        "idle inside of graph launches (kernels not recorded)" in str(w.message) for w in said
    )
    graph = build_graph(trace)
    observed = observe(trace, graph)
    assert np.max(np.abs(replay(observed, graph.dag).relative_error)) < 0.001
    assert np.all(replay(observed, graph.dag, gaps=False).relative_error < -0.5)


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
def test_dlrm_collectives_join_as_published(prism_data):
    """Ends 1 to 7 us apart, transfers of 9 us where raw durations go up to 7.6 ms; names from the execution
    traces beside them: five all-to-all, three all-reduce."""
    trace = read_trace(prism_data / DLRM)
    joined = trace["group"].values != ""
    names = trace["name"].values[joined & (trace["rank"].values == 0)]
    assert (names == "all_to_all").sum() == 5 and (names == "all_reduce").sum() == 3
    graph = build_graph(trace)
    observed = observe(trace, graph)
    facts = json.loads(observed.attrs["provenance"])
    assert facts["end_spread_max"] <= 7.5e-6 and facts["clock_skew_ns"] == [0] * 8
    first = graph.op_of_record[np.flatnonzero(joined & (trace["seq"].values == 0))[0]]
    assert 8e-6 < float(observed.duration[0, first]) < 12e-6
    raw = trace["duration"].values[0, joined & (trace["seq"].values == 0)]
    assert raw.max() > 7e-3 and raw.min() < 15e-6


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
def test_waiting_never_enters_a_pool(prism_data):
    """With raw durations in place of transfers a collective of DLRM would take up to 700 times as long."""
    model = prism.model_from_trace(read_trace(prism_data / DLRM))
    dag = model.dag
    world = [op for op in range(dag.n_ops) if dag.signatures[dag.signature[op]].role == "world"]
    assert len(world) == 8
    assert max(model.op_pools[op].mean for op in world) < 200e-6


# the join, on files whose truth is known


def test_two_ranks_against_known_times(tmp_path):
    trace = read_trace(two_ranks(tmp_path))
    assert trace.sizes["step"] == 3
    graph = build_graph(trace)
    observed = observe(trace, graph)
    reduce = graph.op_of_record[trace["name"].values == "all_reduce"]
    assert len(set(reduce)) == 1
    assert np.allclose(observed.duration[:, reduce[0]], 20e-6)
    assert np.allclose(observed.step_time, 200e-6)
    # the slower rank's compute carries the step: one more microsecond there is one more in the end
    longer = observed.copy(deep=True)
    forward = [
        op
        for op in range(graph.dag.n_ops)
        if graph.dag.signatures[graph.dag.signature[op]].op == "forward" and graph.dag.rank[op] == 1
    ]
    longer["duration"][:, forward] += 300e-6
    moved = replay(longer, graph.dag, gaps=False).replayed
    before = replay(observed, graph.dag, gaps=False).replayed
    assert np.all(moved > before + 150e-6)


def test_ranks_of_one_job_need_not_start_together(tmp_path):
    """A rank that is late by 100 us makes the other wait; the wait is no part of the collective."""
    for rank, late in enumerate((0, 100)):
        events = []
        for s in range(3):
            t = 1000 * s
            begin = t + late + 20
            events += [step(s, t + late, 400 - late), launch(s + 1, t + late + 5),
                       collective(s + 1, begin, t + 150 - begin, [0, 1])]  # fmt: skip
        write(tmp_path, rank, events, world=2)
    trace = read_trace(tmp_path)
    late = np.flatnonzero(trace["name"].values == "late start")
    assert np.allclose(trace["duration"].values[:, late], [[0.0, 100e-6]] * 3)
    graph = build_graph(trace)
    observed = observe(trace, graph)
    reduce = graph.op_of_record[trace["name"].values == "all_reduce"][0]
    assert np.allclose(observed.duration[:, reduce], 30e-6)


def test_files_in_any_order_and_a_folder_are_the_same(tmp_path):
    paths = two_ranks(tmp_path)
    folder = read_trace(tmp_path)
    assert folder.identical(read_trace(paths[::-1])) and folder.identical(read_trace(paths))


def test_many_files_are_read_by_processes_alike(tmp_path, monkeypatch):
    paths = two_ranks(tmp_path)
    here = read_trace(paths)
    monkeypatch.setattr("prism.traces.profiler.WORTH_PROCESSES", 0)
    assert read_trace(paths).identical(here)


def test_pieces_do_not_matter(tmp_path, monkeypatch):
    """A file read in pieces of a few events is the file read at once, gzip or not."""
    path, _ = two_ranks(tmp_path, steps=20)
    path.rename(one := tmp_path / "rank0of1.json")
    text = one.read_text().replace('"world_size": 2', '"world_size": 1')
    text = text.replace("[0, 1]", "[0]").replace('"Group size": 2', '"Group size": 1')
    one.write_text(text)
    whole = read_trace(one)
    packed = tmp_path / "rank0.json.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    for piece in (64, 1000, 4096):
        monkeypatch.setattr("prism.traces.jsonstream.PIECE", piece)
        for path in (one, packed):
            again = read_trace(path)
            assert np.array_equal(again["start"], whole["start"])
            assert again["name"].values.tolist() == whole["name"].values.tolist()


# refused


def changed(path, change):
    document = json.loads(path.read_text())
    path.write_text(json.dumps(change(document)))


def without(name):
    def change(document):
        kept = [e for e in document["traceEvents"] if not e["name"].startswith(name)]
        return document | {"traceEvents": kept}

    return change


def other_kind(document):
    for e in document["traceEvents"]:
        if "Collective name" in e["args"]:
            e["args"]["Collective name"] = "broadcast"
    return document


def other_steps(document):
    for e in document["traceEvents"]:
        if e["name"].startswith("ProfilerStep"):
            e["name"] = f"ProfilerStep#{int(e['name'].split('#')[1]) + 50}"
    return document


def other_world(document):
    document["distributedInfo"]["world_size"] = 8
    return document


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("nccl"), "rank 1 has none of the collectives of ranks 0,1"),
        (other_kind, "number 0 is a all_reduce on rank 0 and a broadcast on rank 1"),
        (other_steps, "no step in common: rank 0 has 0,1,2, rank 1 has 50,51,52"),
        (other_world, "world sizes"),
        (without("cuda"), None),
    ],
)
def test_ranks_that_do_not_match_are_refused(tmp_path, change, message):
    _, path = two_ranks(tmp_path)
    changed(path, change)
    if message is None:
        read_trace(tmp_path)  # a rank without launch records is by time: less known, still right
        return
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path)


def test_collectives_that_do_not_end_together_are_refused(tmp_path):
    for rank in (0, 1):
        events = []
        for s in range(6):
            t = 100_000 * s
            apart = 30_000 * (s % 2) * rank
            events += [step(s, t, 90_000), launch(2 * s + 1, t + 5),
                       collective(2 * s + 1, t + 20, 100 + apart, [0, 1]), launch(2 * s + 2, t + 90),
                       collective(2 * s + 2, t + 50_000, 100 + 30_000 * rank, [0, 1])]  # fmt: skip
        write(tmp_path, rank, events, world=2)
    with pytest.raises(TraceError, match="of a step apart on its members"):
        read_trace(tmp_path)


def test_a_missing_rank_is_refused_and_a_single_one_is_warned_of(tmp_path):
    for rank in range(4):
        events = [step(0, 0, 90), launch(1, 1), collective(1, 10, 9, [0, 1, 2, 3])]
        write(tmp_path, rank, events, world=4)
    (tmp_path / "rank2.json").unlink()
    with pytest.raises(TraceError, match="rank 2 is missing"):
        read_trace(tmp_path)
    with pytest.warns(TraceWarning, match="one rank of 4: its collectives also hold the wait"):
        read_trace(tmp_path / "rank1.json")


def test_no_communication_at_all_between_ranks_is_refused(tmp_path):
    for rank in (0, 1):
        write(tmp_path, rank, [step(0, 0, 90), launch(1, 1), kernel("k", 1, 9, 2)], world=2)
    with pytest.raises(TraceError, match="no communication between 2 ranks"):
        read_trace(tmp_path)


def test_steps_that_differ_too_much_are_refused_and_a_few_are_left_out(tmp_path):
    def file(folder, names):
        events = []
        for s, own in enumerate(names):
            t = 1000 * s
            events.append(step(s, t, 900))
            for i, name in enumerate(own):
                c = 100 * s + i + 1
                events += [launch(c, t + 10 * i), kernel(name, c, t + 10 * i + 20, 5)]
        folder.mkdir(exist_ok=True)
        return write(folder, 0, events)

    with pytest.raises(TraceError, match="steps differ too much"):
        read_trace(file(tmp_path / "a", ["abcdef", "abcdxy", "abuvwz", "ghijkl", "abstpq"]))
    with pytest.warns(TraceWarning, match="steps left out: 1"):
        trace = read_trace(file(tmp_path / "b", ["abcd", "abcd", "xyzw", "abcd"]))
    assert trace["step"].values.tolist() == [0, 1, 3]
    with pytest.warns(TraceWarning, match="are found in every step, the others are left out"):
        trace = read_trace(file(tmp_path / "c", ["abcdefghi", "abcdefghj", "abcdefghi"]))
    assert {"i", "j"}.isdisjoint(trace["name"].values)


def test_a_gzip_bomb_is_refused_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("prism.traces.jsonstream.ALWAYS_ALLOWED", 1 << 22)
    bomb = tmp_path / "rank0.json.gz"
    for filler in (b" ", b'{"ph":"M"},\n'):
        text = b'{"traceEvents": [' + filler * ((1 << 26) // len(filler)) + b"]}"
        bomb.write_bytes(gzip.compress(text))
        with pytest.raises(TraceError, match="decompresses to over"):
            read_trace(bomb)


# fuzzing: nothing but TraceError, whatever the bytes

#: more of it with PRISM_FUZZ=20000 (ten minutes and more)
FUZZ = settings(
    max_examples=int(os.environ.get("PRISM_FUZZ", "150")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@pytest.fixture(scope="module")
def seed_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    two_ranks(folder)
    events = [
        step(0, 0, 90), event("cpu_op", "mm", 1, 30, **{"Input Dims": [[2, 2]], "External id": 7}),
        launch(1, 2), kernel("k", 1, 10, 3), launch(2, 20, "cudaStreamSynchronize"),
        event("cuda_sync", "Stream Wait Event", 8, 0, stream=9, correlation=3, wait_on_stream=7,
              wait_on_cuda_event_record_corr_id=2),
        launch(4, 30), collective(4, 40, 5, [0]),
    ]  # fmt: skip
    return write(folder, 5, events, baseTimeNanoseconds=5).read_bytes()


def survives(path):
    """Read, build, observe: done, or refused in one line."""
    try:
        trace = read_trace(path)
        observed = observe(trace, build_graph(trace))
    except TraceError as refused:
        assert "\n" not in str(refused)
        return
    assert np.all(np.isfinite(observed["duration"])) and np.all(observed["duration"] >= 0)
    assert np.all(np.isfinite(observed["step_time"]))


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
@FUZZ
@given(
    cuts=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), st.binary(max_size=6)), max_size=4)
)
def test_bytes_changed_anywhere_are_read_or_refused(tmp_path_factory, seed_file, cuts):
    text = bytearray(seed_file)
    for where, length, new in cuts:
        at = int(where * len(text))
        text[at : at + length] = new
    path = tmp_path_factory.mktemp("f") / "rank0.json"
    path.write_bytes(bytes(text))
    survives(path)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
@FUZZ
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 20), VALUES), min_size=1, max_size=5
    )
)
def test_fields_of_other_types_and_sizes_are_read_or_refused(tmp_path_factory, seed_file, changes):
    document = json.loads(seed_file)
    for which, field, value in changes:
        e = document["traceEvents"][which % len(document["traceEvents"])]
        keys = [*e, *e["args"]]
        key = keys[field % len(keys)]
        (e["args"] if key in e["args"] else e)[key] = value
        if not isinstance(e["args"], dict):
            break
    path = tmp_path_factory.mktemp("f") / "rank0.json"
    path.write_text(json.dumps(document))
    survives(path)


#: real files of every format, small ones
MUTATED = (
    "traces/hta/event_sync.json.gz",
    "traces/hta/event_sync_multi_stream.json.gz",
    "traces/hta/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "traces/hta/old_names_inference_rank_1.json.gz",
    "traces/chakra/small_chakra.0.json",
    "traces/chakra/feeder_chakra.0.et.gz",
    "traces/astra_sim/all_reduce.0.et",
)


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
@pytest.mark.parametrize("name", MUTATED)
def test_mutated_real_files_are_read_or_refused(prism_data, tmp_path_factory, name):
    whole = (prism_data / name).read_bytes()
    text = gzip.decompress(whole)[: 1 << 18] if name.endswith(".gz") else whole
    folder = tmp_path_factory.mktemp("m")
    path = folder / ("rank.0.et" if ".et" in name else "rank0.json")
    examples = max(10, int(os.environ.get("PRISM_FUZZ", "150")) // 8)
    rng = np.random.default_rng(0)
    for _ in range(examples):
        bad = bytearray(text)
        for _ in range(int(rng.integers(1, 5))):
            at = int(rng.integers(max(len(bad), 1)))
            match int(rng.integers(4)):
                case 0:
                    bad[at : at + 1] = bytes(
                        b ^ 1 << int(rng.integers(8)) for b in bad[at : at + 1]
                    )
                case 1:
                    del bad[at : at + int(rng.integers(1, 200))]
                case 2:
                    other = int(rng.integers(max(len(bad), 1)))
                    bad[at:at] = bad[other : other + int(rng.integers(1, 400))]
                case 3:
                    bad[at : at + 1] = bytes(rng.choice(list(b'0-9e.,:{}[]"\\nN'), 2))
        path.write_bytes(bytes(bad))
        survives(path)


def test_two_writers_interleaved_are_refused(tmp_path):
    """Both processes of a job wrote to one file at once."""
    a, b = (p.read_bytes() for p in two_ranks(tmp_path, steps=30))
    mixed = b"".join(a[i : i + 512] + b[i : i + 512] for i in range(0, len(a), 512))
    path = tmp_path / "mixed" / "rank0.json"
    path.parent.mkdir()
    path.write_bytes(mixed)
    with pytest.raises(TraceError):
        read_trace(path)


def test_invalid_utf8_is_refused(tmp_path):
    path, _ = two_ranks(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"forward", b"f\xff\xferward", 1))
    with pytest.raises(TraceError, match="rank0"):
        read_trace(path)
