"""Faults of real profilers: every case of `trace_cases`, and one more of the same kind for each.

Each test of a case is named by its number; `expect` in `cases.json` says what is right. Where the second file
of a kind stands beside it, it is written here.
"""

from __future__ import annotations

import gzip
import json
import warnings

import numpy as np
import pytest
from kineto_files import collective, event, kernel, launch, step, two_ranks, write

from prism.model.engine.montecarlo import propagate
from prism.traces import TraceError, TraceWarning, build_graph, observe, read_trace
from prism.traces.profiler.events import read_kineto


@pytest.fixture
def case(prism_data):
    def files(number: int):
        (folder,) = (prism_data / "trace_cases").glob(f"{number:02d}_*")
        return sorted(p for p in folder.iterdir())

    return files


def quiet(paths, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        return read_trace(paths, **options)


def ops(trace, name):
    """Records whose name begins so: (start, end) in microseconds, (record, step)."""
    at = np.flatnonzero([n.startswith(name) for n in trace["name"].values])
    start = trace["start"].values.T[at] * 1e6
    return start, start + trace["duration"].values.T[at] * 1e6


def edges(trace):
    """Dependencies found by the reader, by name."""
    name = trace["name"].values
    pairs = zip(trace["edge_from"].values, trace["edge_to"].values, strict=True)
    return {(str(name[a]), str(name[b])) for a, b in pairs}


# 1: records that were never completed


def test_01_kernels_never_completed_are_dropped_and_counted(case):
    with pytest.warns(TraceWarning, match=r"never completed \(time 0 and duration 0\): 1"):
        trace = read_trace(case(1))
    start, end = ops(trace, "sgemm_a")
    assert start.shape == (1, 1) and end - start == pytest.approx(50)
    observed = observe(trace, build_graph(trace))
    assert float(observed.step_time[0]) == pytest.approx(9000e-6)


def test_01_a_thousand_of_them_are_one_warning(tmp_path):
    lost = [kernel("k", i, 0, 0) for i in range(1000)]
    path = write(
        tmp_path, 0, [step(0, 100, 50), launch(2000, 101), kernel("k", 2000, 110, 5), *lost]
    )
    with pytest.warns(TraceWarning) as said:
        read_trace(path)
    assert len(said) == 1 and "duration 0): 1000" in str(said[0].message)


# 2, 3: what is no JSON


def test_02_single_backslashes_are_repaired(case):
    with pytest.warns(TraceWarning, match="repaired: 1"):
        trace = read_trace(case(2))
    assert trace.sizes["op"] == 1


def test_02_a_backslash_that_ends_a_string_is_refused_as_an_invalid_escape(tmp_path):
    path = tmp_path / "rank0.json"
    text = json.dumps({"traceEvents": [kernel("k", 1, 1, 1)]}).replace('"k"', '"C:\\dir\\U"')
    path.write_text(text[:-20] + '"C:\\"' + text[-20:])
    with pytest.raises(TraceError, match="invalid escape"):
        read_trace(path)


def test_03_bare_tokens_drop_only_the_event_whose_time_they_are(case):
    with pytest.warns(TraceWarning, match="no time, or not a number: 1"):
        trace = read_trace(case(3))
    start, _ = ops(trace, "k")
    # times count from the first event, at 5
    assert start.tolist() == [[5.0]]
    assert np.all(np.isfinite(trace["duration"]))


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-inf", "nan(ind)", "null"])
def test_03_other_tokens(tmp_path, token):
    text = json.dumps({"traceEvents": [kernel("a", 1, 1, 7), kernel("b", 2, 9, 12345)]})
    (tmp_path / "rank0.json").write_text(text.replace("12345", token))
    trace = quiet(tmp_path / "rank0.json")
    assert trace["name"].values.tolist() == ["a"]


# 4: no steps


def test_04_without_steps_the_file_is_step_0_and_says_so(case):
    with pytest.warns(TraceWarning, match="no ProfilerStep: the whole file is one step"):
        trace = read_trace(case(4))
    assert trace["step"].values.tolist() == [0]


def test_04_two_runs_in_one_file_are_refused(tmp_path):
    events = [step(1, 0, 5000), step(2, 2000, 5000), launch(1, 5), kernel("k", 1, 9, 1)]
    with pytest.raises(
        TraceError, match="steps 1 and 2 overlap, so the file holds more than one run"
    ):
        read_trace(write(tmp_path, 0, events))


# 5: waits on events


def test_05_a_wait_is_on_the_stream_that_the_event_was_recorded_on(case):
    trace = read_trace(case(5))
    assert ("mm_s1", "mm_s2") in edges(trace) and ("mm_s3", "mm_s2") not in edges(trace)
    graph = build_graph(trace)
    observed = observe(trace, graph)
    _, finish = propagate(graph.dag, observed.duration.values.T, observed.gap.values.T)
    end = {
        n: float(finish[op, 0]) * 1e6
        for n, op in zip(trace.name.values, graph.op_of_record, strict=True)
    }
    assert end["mm_s3"] == pytest.approx(142) and end["mm_s2"] == pytest.approx(80)


def test_05_a_wait_that_was_not_obeyed_is_no_dependency(tmp_path):
    events = [
        step(0, 0, 100), launch(1, 1), kernel("a", 1, 10, 50, stream=7),
        launch(2, 5, "cudaEventRecord"), launch(3, 8, "cudaStreamWaitEvent"),
        event("cuda_sync", "Stream Wait Event", 8, 0, stream=9, correlation=3, wait_on_stream=7,
              wait_on_cuda_event_record_corr_id=2),
        launch(4, 12), kernel("b", 4, 20, 5, stream=9),
    ]  # fmt: skip
    assert ("a", "b") not in edges(read_trace(write(tmp_path, 0, events)))


# 6: collectives without metadata


def test_06_a_collective_kernel_without_metadata_takes_that_of_its_record(case):
    trace = read_trace(case(6))
    both = trace["name"].values == "all_gather"
    assert both.sum() == 2 and set(trace["group"].values[both]) == {"0,1"}
    graph = build_graph(trace)
    assert len(set(graph.op_of_record[both])) == 1


def test_06_without_any_record_it_still_is_communication_of_all(tmp_path):
    for rank in (0, 1):
        name = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
        write(
            tmp_path,
            rank,
            [step(0, 0, 90), launch(1, 1), kernel(name, 1, 10, 9, stream=20)],
            world=2,
        )
    trace = read_trace(tmp_path)
    assert trace["group"].values.tolist().count("0,1") == 2
    assert "compute" not in trace["role"].values


# 7: times


def test_07_nanoseconds_survive(case):
    e = read_kineto(case(7)[0])
    device = e.kind == 0
    assert e.start[device].tolist() == [
        1712195495505590123, 1712195495505593579, 1712195495505595579,
    ]  # fmt: skip
    assert e.duration[device].tolist() == [3456, 2000, 64]
    trace = read_trace(case(7))
    observed = observe(trace, graph := build_graph(trace))
    gap = observed.gap.values[0][graph.op_of_record]
    late = gap[[n in "bc" for n in trace["name"].values]]
    assert np.all(late < 1e-12)


@pytest.mark.parametrize(
    ("ts", "dur", "ns"),
    [
        ("1712195495505590.125", "0.5", (1712195495505590125, 500)),
        ("1712195495505590", "2", (1712195495505590000, 2000)),
        ('"1712195495505590.001"', '"1e1"', (1712195495505590001, 10000)),
        ("4458676416788.066", "5.088", (4458676416788066, 5088)),
        ("1e3", "0.001", (1000000, 1)),
    ],
)
def test_07_all_forms_of_numbers(tmp_path, ts, dur, ns):
    text = json.dumps({"traceEvents": [kernel("k", 1, "TS", "DUR")]})
    path = tmp_path / "rank0.json"
    path.write_text(text.replace('"TS"', ts).replace('"DUR"', dur))
    e = read_kineto(path)
    assert (int(e.start[0]), int(e.duration[0])) == ns


# 8: links


def test_08_rocm_links_by_external_id_where_there_is_no_correlation(case):
    trace = quiet(case(8))
    device = trace["stream"].values == "0"
    assert device.sum() == 2
    shapes = dict(zip(trace["name"].values[device], trace["shape"].values[device], strict=True))
    assert shapes["Cijk_Ailk_Bljk"] == "[[8,8],[8,8]]"
    assert ("host", "Cijk_Ailk_Bljk") in edges(trace)


def test_08_of_several_calls_with_one_external_id_the_last_before_the_kernel_launched_it(tmp_path):
    def rocm(kind, name, ts, dur, ext):
        return event(kind, name, ts, dur, **{"External id": ext})

    events = [
        step(0, 0, 100),
        rocm("cuda_runtime", "hipLaunchKernel", 1, 2, 5),
        rocm("cuda_runtime", "hipLaunchKernel", 30, 2, 5),
        rocm("kernel", "k", 40, 10, 5),
    ]
    trace = read_trace(write(tmp_path, 0, events))
    _, end = ops(trace, "host")
    assert 30 in np.rint(end)


# 9: process groups


def test_09_groups_are_keyed_by_ranks_and_not_by_name(case):
    trace = read_trace(case(9))
    groups = {g for g in trace["group"].values if g}
    assert groups == {"0,2", "1,3"}
    with pytest.warns(TraceWarning, match="2 parts that never meet"):
        graph = build_graph(trace)
    observed = observe(trace, graph)
    _, finish = propagate(graph.dag, observed.duration.values.T, observed.gap.values.T)
    at = {g: graph.op_of_record[trace["group"].values == g][0] for g in groups}
    assert finish[at["0,2"], 0] * 1e6 == pytest.approx(120)
    assert finish[at["1,3"], 0] * 1e6 == pytest.approx(135)


def test_09_a_rank_outside_of_its_own_group_is_refused(tmp_path):
    for rank in (0, 1):
        events = [step(0, 0, 90), launch(1, 1), collective(1, 10, 9, [1])]
        write(tmp_path, rank, events, world=2)
    with pytest.raises(TraceError, match="rank 0 takes part in a all_reduce of ranks 1, to which"):
        read_trace(tmp_path)


# 10: unfinished


def test_10_unfinished_events_are_left_out_and_counted(case):
    with pytest.warns(TraceWarning, match=r"unfinished \(negative duration\): 2"):
        trace = read_trace(case(10))
    names = trace["name"].values.tolist()
    assert "b" in names and "a" not in names
    assert np.all(trace["duration"] >= 0)


def test_10_a_negative_duration_in_a_table_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("rank,step,op,start,duration\n0,0,a,0,1\n0,0,b,1,-1\n")
    with pytest.raises(TraceError, match="duration must be a number >= 0"):
        read_trace(tmp_path / "t.csv")


# 11: ranks


def test_11_rank_from_the_name_with_a_warning_and_two_of_one_rank_are_refused(case, tmp_path):
    one, seven = case(11)
    assert read_trace(one)["rank"].values.tolist()[0] == 0
    with pytest.warns(TraceWarning, match="rank 7 taken from the file's name"):
        assert set(read_trace(seven)["rank"].values) == {7}
    with pytest.raises(TraceError, match="tells no rank"):
        quiet([one, seven])
    twin = tmp_path / "worker7.json"
    twin.write_bytes(seven.read_bytes())
    with pytest.raises(TraceError, match="are both rank 7"):
        quiet([seven, twin])
    with pytest.raises(TraceError, match=r"worker7.* no communication between 2 ranks"):
        quiet([seven, one], ranks=[0, 1])


# 12: ids


def test_12_ids_beyond_int64_are_accepted(case):
    trace = quiet(case(12))
    assert trace["name"].values.tolist() == ["all_reduce"]


def test_12_two_such_ids_stay_apart(tmp_path):
    high = (1 << 63) + 5
    events = [step(0, 0, 100), launch(high, 1), launch(high + 1, 50), kernel("a", high, 10, 5),
              kernel("b", high + 1, 60, 5)]  # fmt: skip
    trace = read_trace(write(tmp_path, 0, events))
    _, end = ops(trace, "host")
    assert {1, 50} <= set(np.rint(end).ravel().tolist())


# 13: truncated


def test_13_truncated_and_empty_files_are_refused_and_gzip_is_told_by_its_first_bytes(case):
    plain, packed, empty, misnamed = case(13)
    for path, what in ((plain, "truncated"), (packed, "truncated gzip"), (empty, "empty file")):
        with pytest.raises(TraceError, match=what) as refused:
            read_trace(path)
        assert path.name in str(refused.value) and "\n" not in str(refused.value)
    assert quiet(misnamed).sizes["op"] > 200


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
def test_13_a_file_cut_anywhere_is_refused(tmp_path, kept):
    (path, _) = two_ranks(tmp_path)
    text = path.read_bytes()
    for packed in (False, True):
        cut = tmp_path / f"cut{packed}.json"
        whole = gzip.compress(text) if packed else text
        cut.write_bytes(whole[: int(kept * len(whole))])
        with pytest.raises(TraceError, match="truncated"):
            read_trace(cut)


# 14: graphs


def test_14_kernels_of_a_graph_are_ops_of_their_own_after_one_launch(case):
    trace = read_trace(case(14))
    device = trace["stream"].values == "7"
    assert device.sum() == 5 and trace["name"].values[device].tolist().count("gemm") == 2
    launched = [b for a, b in edges(trace) if a == "host"]
    assert sorted(launched) == ["adam", "ln"]
    shapes = trace["shape"].values[trace["name"].values == "gemm"]
    assert len(set(shapes)) == 2 and all("node" in s for s in shapes)


def test_14_a_graph_on_two_streams_launches_the_first_op_of_each(tmp_path):
    events = [step(0, 0, 100), launch(1, 5, "cudaGraphLaunch"),
              kernel("a", 1, 20, 5, stream=7), kernel("b", 1, 26, 5, stream=7),
              kernel("c", 1, 21, 9, stream=8)]  # fmt: skip
    found = edges(read_trace(write(tmp_path, 0, events)))
    assert {("host", "a"), ("host", "c")} <= found and ("host", "b") not in found


# 15: leaves


def test_15_compute_and_collectives_wait_for_each_other(case):
    trace = read_trace(case(15))
    assert {("bwd", "all_reduce"), ("all_reduce", "opt")} <= edges(trace)
    graph = build_graph(trace)
    observed = observe(trace, graph)
    reduce = graph.op_of_record[trace["name"].values == "all_reduce"]
    assert reduce[0] == reduce[1]
    assert float(observed.duration[0, reduce[0]]) * 1e6 == pytest.approx(20)
    _, finish = propagate(graph.dag, observed.duration.values.T)
    opt = graph.op_of_record[trace["name"].values == "opt"]
    # without gaps all is earlier by the launches, and the optimizers are together
    assert finish[opt[0], 0] == finish[opt[1], 0]


def test_15_a_coincidence_that_one_step_does_not_show_is_no_dependency(tmp_path):
    """Op b starts at the end of a, on another stream, in two steps of three; in the third it is early."""
    events = []
    for s, begin in enumerate((60, 60, 40)):
        t = 200 * s
        events += [step(s, t, 200), launch(2 * s + 1, t + 1), launch(2 * s + 2, t + 2),
                   kernel("a", 2 * s + 1, t + 10, 50), kernel("b", 2 * s + 2, t + begin, 5, stream=9)]  # fmt: skip
    assert ("a", "b") not in edges(read_trace(write(tmp_path, 0, events)))
    assert ("a", "b") in edges(read_trace(write(tmp_path, 0, events[:10])))


# 16: clocks


def test_16_base_times_are_added_and_the_rest_of_the_skew_is_estimated(case):
    trace = read_trace(case(16))
    skew = json.loads(trace.attrs["provenance"])["clock_skew_ns"]
    assert skew[1] - skew[0] == 500
    observed = observe(trace, graph := build_graph(trace))
    reduce = graph.op_of_record[trace["name"].values == "all_reduce"][0]
    assert float(observed.duration[0, reduce]) * 1e6 == pytest.approx(15)


def test_16_skews_of_four_ranks_in_overlapping_groups_are_found(tmp_path):
    off = [0, 40, -25, 90]
    groups = {0: [[0, 1]], 1: [[0, 1], [1, 2]], 2: [[1, 2], [2, 3]], 3: [[2, 3]]}
    end = {"0,1": 50, "1,2": 90, "2,3": 130}
    for rank, own in groups.items():
        events = []
        for s in range(3):
            t = 1000 * (s + 1) + off[rank]
            events.append(step(s, t, 200))
            for i, g in enumerate(own):
                c = 10 * s + i + 1
                e = t + end[",".join(map(str, g))]
                events += [launch(c, t + 2 + i), collective(c, e - 12, 12, g)]
        write(tmp_path, rank, events, world=4)
    skew = np.array(json.loads(read_trace(tmp_path).attrs["provenance"])["clock_skew_ns"]) / 1000
    assert np.allclose(skew - skew[0], off, atol=0.5)


# 17, 18: old files


def test_17_old_names_are_read(case):
    trace = quiet(case(17))
    device = trace["stream"].values == "7"
    assert trace["name"].values[device].tolist() == ["gemm"]
    assert trace["shape"].values[device].tolist() == ["[[2,2],[2,2]]"]


@pytest.mark.parametrize("cat", ["KERNEL", "Kernel", "concurrent_kernel", "gpu_memset", "Memcpy"])
def test_17_categories_in_any_case(tmp_path, cat):
    events = [step(0, 0, 90), launch(1, 1), kernel("k", 1, 9, 2) | {"cat": cat}]
    assert "k" in read_trace(write(tmp_path, 0, events))["name"].values


def test_18_an_external_id_that_is_the_correlation_names_no_op(case):
    trace = read_trace(case(18))
    assert trace["shape"].values[trace["name"].values == "gemm"].tolist() == ["[[2,2],[2,2]]"]


def test_18_nested_ops_give_the_innermost_shape(tmp_path):
    events = [
        step(0, 0, 90),
        event("cpu_op", "outer", 1, 30, **{"Input Dims": [[9]], "External id": 1}),
        event("cpu_op", "inner", 5, 10, **{"Input Dims": [[3, 3]], "External id": 2}),
        event("cpu_op", "earlier", 2, 2, **{"Input Dims": [[7]], "External id": 3}),
        launch(50, 8),
        kernel("k", 50, 20, 3, **{"External id": 50}),
    ]
    trace = read_trace(write(tmp_path, 0, events))
    assert trace["shape"].values[trace["name"].values == "k"].tolist() == ["[[3,3]]"]


# 19: steps


def test_19_a_kernel_belongs_to_the_step_of_its_launch(case):
    trace = read_trace(case(19))
    start, end = ops(trace, "g")
    # step 2 counts from 150, when the device was free
    assert sorted(start[:, 0]) == [30, 90] and sorted(end[:, 0]) == [90, 150]
    assert sorted(start[:, 1]) == [0, 60] and sorted(end[:, 1]) == [60, 120]
    observed = observe(trace, build_graph(trace))
    # the first step begins with the host's mark, at 0
    assert np.allclose(observed.step_time * 1e6, [150, 120])


def test_19_step_times_add_up_to_the_run_when_the_device_is_far_behind(tmp_path):
    events = []
    for s in range(5):
        t = 100 * s
        events += [step(s, t, 100), launch(s + 1, t + 5), kernel("k", s + 1, 20 + 300 * s, 300)]
    trace = read_trace(write(tmp_path, 0, events))
    observed = observe(trace, build_graph(trace))
    assert float(observed.step_time.sum()) * 1e6 == pytest.approx(20 + 5 * 300)
    assert np.allclose(observed.step_time[1:] * 1e6, 300)
