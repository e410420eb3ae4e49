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
from prism.traces import (
    MeasuredSteps,
    TraceError,
    TraceWarning,
    build_graph,
    observe,
    read_trace,
    replay,
)

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
    assert np.max(np.abs(replay(observed).relative_error)) < 0.001
    assert np.max(np.abs(replay(observed, gaps=False).relative_error)) < without


def test_replay_of_a_trace_that_lacks_kernels_says_what_it_lacks(prism_data):
    """negative_queue: kernels of CUDA graphs are not in the file, so a third of the step is explained."""
    with pytest.warns(TraceWarning) as said:
        trace = read_trace(prism_data / "traces/hta/negative_queue.rank0of16.json.gz")
    assert any(
        "idle inside of graph launches (kernels not recorded)" in str(w.message) for w in said
    )
    graph = build_graph(trace)
    observed = observe(trace, graph)
    assert np.max(np.abs(replay(observed).relative_error)) < 0.001
    assert np.all(replay(observed, gaps=False).relative_error < -0.5)


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
    facts = observed.provenance
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
    longer = observed.steps.copy(deep=True)
    forward = [
        op
        for op in range(graph.dag.n_ops)
        if graph.dag.signatures[graph.dag.signature[op]].op == "forward" and graph.dag.rank[op] == 1
    ]
    longer["duration"][:, forward] += 300e-6
    moved = replay(MeasuredSteps(graph.dag, longer), gaps=False).replayed
    before = replay(observed, gaps=False).replayed
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
    monkeypatch.setattr("prism.traces.profiler.ranks.WORTH_PROCESSES", 0)
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
        monkeypatch.setattr("prism.traces.profiler.json_stream.PIECE", piece)
        for path in (one, packed):
            again = read_trace(path)
            assert np.array_equal(again["start"], whole["start"])
            assert again["name"].values.tolist() == whole["name"].values.tolist()


@pytest.mark.parametrize("stages", [2, 3])
def test_sends_and_receives_of_nccl_are_one_transfer_each(tmp_path, stages):
    """A pipeline of forwards: each stage receives, computes 30 to 50, sends; a receive posted early waits."""
    work = [30, 50, 40]
    for rank in range(stages):
        events = []
        for s in range(3):
            t = 1000 * s
            events.append(step(s, t, 900))
            ready = t + 10 + sum(work[:rank]) + 15 * rank
            if rank:
                said = {"Src Rank": rank - 1, "Process Group Ranks": f"[{rank - 1}, {rank}]"}
                events += [launch(10 * s + 1, t + 2),
                           collective(10 * s + 1, t + 5, ready - t - 5, [rank - 1, rank], "recv", **said)]  # fmt: skip
            events += [launch(10 * s + 2, t + 4), kernel("forward", 10 * s + 2, ready, work[rank])]
            if rank + 1 < stages:
                said = {"Dst Rank": rank + 1, "Process Group Ranks": f"[{rank}, {rank + 1}]"}
                events += [launch(10 * s + 3, t + 6),
                           collective(10 * s + 3, ready + work[rank], 15, [rank, rank + 1], "send", **said)]  # fmt: skip
        write(tmp_path, rank, events, world=stages)
    trace = read_trace(tmp_path)
    graph = build_graph(trace)
    observed = observe(trace, graph)
    links = [op for op in range(graph.dag.n_ops)
             if graph.dag.signatures[graph.dag.signature[op]].role == "pp"]  # fmt: skip
    assert len(links) == stages - 1
    assert np.allclose(observed.duration[:, links], 15e-6)
    longer = observed.steps.copy(deep=True)
    first = [op for op in range(graph.dag.n_ops) if graph.dag.rank[op] == 0
             and graph.dag.signatures[graph.dag.signature[op]].op == "forward"]  # fmt: skip
    longer["duration"][:, first] += 5e-3
    moved = replay(MeasuredSteps(graph.dag, longer), gaps=False).replayed
    # all later stages wait for the first
    assert np.all(moved > 5e-3 + sum(work[:stages]) * 1e-6)


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
    monkeypatch.setattr("prism.traces.profiler.json_stream.ALWAYS_ALLOWED", 1 << 22)
    bomb = tmp_path / "rank0.json.gz"
    for filler in (b" ", b'{"ph":"M"},\n'):
        text = b'{"traceEvents": [' + filler * ((1 << 26) // len(filler)) + b"]}"
        bomb.write_bytes(gzip.compress(text))
        with pytest.raises(TraceError, match="decompresses to over"):
            read_trace(bomb)


# steps of a job, and what is cut, corrected or not known


def overlapping(folder):
    """A collective at the begin of each step, then work of 50 and 100: a run of four steps in 480."""
    for rank, work in enumerate((50, 100)):
        events = []
        for s in range(4):
            t = 120 * s
            free = t if s == 0 else 120 * (s - 1) + 20 + work
            events += [
                step(s, free, (20 + work) if s == 0 else t + 20 + work - free),
                launch(10 * s + 1, max(free, 1) + 1),
                collective(10 * s + 1, free + 2, t + 20 - free - 2, [0, 1]),
                launch(10 * s + 2, free + 3),
                kernel("work", 10 * s + 2, t + 20, work),
            ]
        write(folder, rank, events, world=2)


def test_step_times_add_up_where_a_fast_rank_begins_early(tmp_path):
    overlapping(tmp_path)
    trace = read_trace(tmp_path)
    graph = build_graph(trace)
    observed = observe(trace, graph)
    assert float(observed.step_time.sum()) * 1e6 == pytest.approx(480)
    work = graph.op_of_record[trace["name"].values == "work"]
    assert np.allclose(observed.duration[:, work] * 1e6, [[50, 100]] * 4)


def test_work_beside_the_step_before_is_cut_and_said(tmp_path):
    events = []
    for s in range(3):
        t, c = 200 * s, 10 * s
        events += [step(s, t, 200), launch(c + 1, t + 5), kernel("compute", c + 1, t + 10, 100),
                   launch(c + 2, t + 110), kernel("Memcpy DtoH", c + 2, t + 120, 200, stream=9)]  # fmt: skip
    with pytest.warns(TraceWarning, match="ran beside the step before, cut off, us a step: 66"):
        trace = read_trace(write(tmp_path, 0, events))
    observed = observe(trace, build_graph(trace))
    assert float(observed.step_time.sum()) * 1e6 == pytest.approx(2 * 200 + 320)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [((10, 11, 0, 1), "step numbers go back"), ((0, 1, 0, 1), "step 0 is marked twice")],
)
def test_two_runs_in_one_file_are_refused(tmp_path, numbers, message):
    events = []
    for k, number in enumerate(numbers):
        t = 5000 * k
        events += [step(number, t, 4900), launch(k + 1, t + 5), kernel("k", k + 1, t + 10, 100)]
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, 0, events))


def test_files_of_different_days_are_refused(tmp_path):
    _, path = two_ranks(tmp_path)
    changed(path, lambda d: d | {"baseTimeNanoseconds": 86_400 * 10**9})
    with pytest.raises(TraceError, match="s from those of the others"):
        read_trace(tmp_path)


def test_a_clock_within_the_error_of_the_ends_is_left_alone_and_a_clear_one_is_not(tmp_path):
    rng = np.random.default_rng(0)
    for lead, expected in ((0, 0), (80, 80)):
        folder = tmp_path / str(lead)
        folder.mkdir()
        for rank in (0, 1):
            events = []
            for s in range(60):
                t, late = 10_000 * s, rng.normal(0, 80) if rank else 0
                events += [step(s, t + lead * rank, 9000), launch(s + 1, t + lead * rank + 5),
                           collective(s + 1, t + 1000, 500 + lead * rank + late, [0, 1])]  # fmt: skip
            write(folder, rank, events, world=2)
        trace = read_trace(folder)
        skew = json.loads(trace.attrs["provenance"])["clock_skew_ns"]
        assert (skew[1] - skew[0]) / 1000 == pytest.approx(expected, abs=40 if expected else 0)


def test_groups_that_the_profiler_cut_short_come_from_the_header(tmp_path):
    """Waiting of 300 us never becomes a duration, though the kernels do not list their ranks in full."""
    pairs = {0: [0, 3], 3: [0, 3], 1: [1, 2], 2: [1, 2]}
    for rank, own in pairs.items():
        late = 300 if rank > own[0] else 0
        cut = {"Process Group Ranks": f"[{own[0]}, ..., {own[1]}]", "Process Group Name": "7"}
        events = [step(0, 0, 900), launch(1, 1), collective(1, 100 + late, 320 - late, own, **cut)]
        info = {"rank": rank, "world_size": 4, "pg_config": [{"pg_name": "7", "ranks": own}]}
        write(tmp_path, rank, events, distributedInfo=info)
    trace = read_trace(tmp_path)
    with pytest.warns(TraceWarning, match="2 parts that never meet"):
        graph = build_graph(trace)
    observed = observe(trace, graph)
    joined = graph.op_of_record[trace["group"].values != ""]
    assert np.allclose(observed.duration[0, joined], 20e-6)


def test_groups_whose_members_nobody_tells_are_said(tmp_path):
    for rank in range(4):
        cut = {"Process Group Ranks": "[0, ..., 3]"}
        events = [step(0, 0, 900), launch(1, 1), collective(1, 100, 20, [0, 1], **cut),
                  launch(2, 200), collective(2, 300, 20, [0, 1, 2, 3])]  # fmt: skip
        write(tmp_path, rank, events, world=4)
    with pytest.warns(TraceWarning, match="whose members are not known: they hold the wait"):
        read_trace(tmp_path)


def test_ranks_that_only_the_groups_know_of_are_missed(tmp_path):
    for rank in (0, 1):
        events = [step(0, 0, 900), launch(1, 1), collective(1, 100, 20, list(range(8)))]
        write(tmp_path, rank, events, distributedInfo={"rank": rank})
    with pytest.raises(TraceError, match="rank 2 is missing"):
        read_trace(tmp_path)


def test_streams_of_two_devices_are_refused(tmp_path):
    events = [step(0, 0, 90), launch(1, 1), kernel("a", 1, 9, 2, device=0), launch(2, 20),
              kernel("b", 2, 29, 2, device=1)]  # fmt: skip
    with pytest.raises(TraceError, match="streams of one number on several devices"):
        read_trace(write(tmp_path, 0, events))


def test_a_world_out_of_range_is_refused(tmp_path):
    with pytest.raises(TraceError, match="world size of 100000000 is out of range"):
        read_trace(write(tmp_path, 0, [step(0, 0, 9), kernel("k", 1, 1, 1)], world=10**8))


def test_a_record_describes_one_kernel(tmp_path):
    said = event("cpu_op", "record_param_comms", 1, 5, **{
        "Collective name": "allreduce", "In msg nelems": 777, "Process Group Ranks": "[0]",
        "Group size": 1})  # fmt: skip
    bare = "ncclDevKernel_AllGather_RING(ncclDevKernelArgsStorage<4096ul>)"
    events = [step(0, 0, 900), said, launch(1, 3), collective(1, 10, 20, [0]), launch(2, 500),
              kernel(bare, 2, 510, 20, stream=20)]  # fmt: skip
    trace = read_trace(write(tmp_path, 0, events))
    assert trace["name"].values[trace["role"].values == "world"].tolist() == [
        "all_reduce",
        "all_gather",
    ]


# host work


def test_stretches_of_host_work_keep_their_own_durations(tmp_path):
    """Always the same stretch is long: no draw may mix it with the short ones before the same kernel."""
    events = []
    for s in range(12):
        t = 20_000 * s
        events.append(step(s, t, 19_000))
        for i in range(20):
            c = 100 * s + i + 1
            at = t + 10 + 100 * i + (1000 * (i // 5))
            events += [launch(c, at), kernel("k", c, at + 10, 5)]
    model = prism.model_from_trace(read_trace(write(tmp_path, 0, events)))
    times = prism.simulate(model, 500).step_time
    assert np.ptp(times.values) < 1e-9 and float(times[0]) == pytest.approx(19e-3)


@pytest.mark.parametrize("steps_that_wait", [(0, 2), (1,)])
def test_a_synchronisation_waits_for_its_op_though_not_in_every_step(tmp_path, steps_that_wait):
    """Host work after it stays what it is; the wait is no work."""
    events = []
    for s in range(3):
        t = 1000 * s
        length = 400 if s in steps_that_wait else 20
        returns = max(t + 10 + length, t + 50)
        events += [
            step(s, t, 900), launch(2 * s + 1, t + 5), kernel("a", 2 * s + 1, t + 10, length),
            launch(900 + s, t + 45, "cudaStreamSynchronize", returns - t - 45 + 3),
            launch(2 * s + 2, returns + 20), kernel("b", 2 * s + 2, returns + 30, 5),
        ]  # fmt: skip
    trace = read_trace(write(tmp_path, 0, events))
    assert ("a", "cudaStreamSynchronize") in {
        (str(trace["name"].values[i]), str(trace["name"].values[j]))
        for i, j in zip(trace["edge_from"].values, trace["edge_to"].values, strict=True)
    }
    before_b = [i for i, s in enumerate(trace["shape"].values) if s.endswith("before b")]
    assert np.allclose(trace["duration"].values[:, before_b], 17e-6, atol=4e-6)


def test_a_launch_that_waits_for_room_is_no_work(tmp_path):
    """The queue is full: the launch of c returns when a ends."""
    events = []
    for s in range(3):
        t = 2000 * s
        events += [
            step(s, t, 1900), launch(10 * s + 1, t + 5), kernel("a", 10 * s + 1, t + 10, 500),
            launch(10 * s + 2, t + 15, dur=500), kernel("b", 10 * s + 2, t + 520, 5),
            launch(10 * s + 3, t + 530), kernel("c", 10 * s + 3, t + 540, 5),
        ]  # fmt: skip
    trace = read_trace(write(tmp_path, 0, events))
    graph = build_graph(trace)
    observed = observe(trace, graph)
    host = [i for i, s in enumerate(trace["stream"].values) if s == "host"]
    work = observed.duration[:, graph.op_of_record[host]].sum("op") * 1e6
    # the whole step but for the 500 that the launch waited
    assert np.allclose(work, 1900 - 500, atol=10)


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
@pytest.mark.parametrize("change", ["no stream order", "twice the compute"])
def test_replay_without_gaps_can_fail_negative_control(prism_data, change):
    """MI300, which its device carries: cut the order of its streams, or lengthen its kernels."""
    trace = read_trace(prism_data / REAL["TraceLens MI300"][0])
    if change == "no stream order":
        trace["stream"] = ("op", np.where(trace["stream"].values == "host", "host", ""))
    graph = build_graph(trace)
    observed = observe(trace, graph)
    if change == "twice the compute":
        compute = np.array([s.role == "compute" for s in graph.dag.signatures])[graph.dag.signature]
        observed.duration[:, compute] *= 2
    assert np.all(np.abs(replay(observed, gaps=False).relative_error) > 0.021)


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
    assert np.all(np.isfinite(observed.duration)) and np.all(observed.duration >= 0)
    assert np.all(np.isfinite(observed.step_time))


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
