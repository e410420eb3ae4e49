"""Pipeline schedules: op lists, start times, makespans, bubbles and memory against recorded oracles."""

from __future__ import annotations

import json

import pytest

from prism.model.schedules import SCHEDULES, Op, Schedule, ScheduleError, one_f_one_b, read_schedule

UNIT = {"F": 1.0, "B": 1.0, "W": 1.0}


@pytest.fixture(scope="module")
def oracle(prism_data):
    return json.loads((prism_data / "schedules.json").read_text())


def cases(oracle):
    for case in oracle["schedules"]:
        yield case, SCHEDULES[case["name"]](case["stages"], case["microbatches"], case["chunks"])


def test_every_op_list_and_placement_against_published(oracle):
    seen = 0
    for case, made in cases(oracle):
        assert [[list(o) for o in own] for own in made.ranks] == case["ops"], case["name"]
        assert [list(p) for p in made.placement] == case["placement"]
        assert [sorted(p) for p in made.pairs] == [[a for a, _ in p] for p in case["overlap_pairs"]]
        seen += 1
    assert seen == 18


def test_start_times_makespans_bubbles_and_memory_against_published(oracle):
    for case, made in cases(oracle):
        starts, makespan = made.start_times(UNIT)
        assert starts == case["starts"], case["name"]
        assert makespan == case["makespan"]
        whole, span = made.bubble(UNIT)
        assert whole == pytest.approx(case["bubble_fraction_makespan"], abs=1e-6)
        assert span == pytest.approx(case["bubble_fraction_span"], abs=1e-6)
        assert made.peak_activations() == case["peak_inflight_chunk_activations"]


def test_the_grid_of_sizes_times_latency_and_a_slowed_rank_against_published(oracle):
    checked = 0
    for row in oracle["grid"]:
        make = SCHEDULES[row["name"]]
        made = make(
            row["stages"], row["microbatches"], row.get("chunks", 2 if row["name"] in TWO else 1)
        )
        assert made.peak_activations() == row["peak_inflight_chunk_activations"]
        for text, makespan in row["makespan"].items():
            times = dict(zip("FBW", map(float, text.split(",")), strict=True))
            assert made.start_times(times)[1] == pytest.approx(makespan)
            whole, span = made.bubble(times)
            assert whole == pytest.approx(row["bubble_makespan"][text], abs=1e-6)
            assert span == pytest.approx(row["bubble_span"][text], abs=1e-6)
            checked += 1
        assert made.start_times(UNIT, latency=1.0)[1] == row["makespan_p2p_latency_1"]
        assert made.start_times(UNIT, slowed={1: 1.5})[1] == row["makespan_rank1_x1.5"]
        for key in row:
            if key.startswith("makespan_") and key not in KNOWN:
                assert made.start_times(UNIT, paired=2.0)[1] == row[key], (row["name"], key)
    assert checked >= 3 * len(oracle["grid"]) > 60


TWO = {"interleaved_1f1b", "zbv", "dualpipev"}
KNOWN = {"makespan_p2p_latency_1", "makespan_rank1_x1.5"}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("interleaved_1f1b", (4, 6, 2), "multiple of 4 microbatches, got 6; 4 or 8 would do"),
        ("zbv", (4, 6, 2), "at least 7 microbatches, got 6"),
        ("dualpipe", (3, 8, 1), "even number of ranks"),
        ("dualpipev", (4, 7, 2), "at least 8 microbatches"),
        ("1f1b", (4, 8, 2), "1 chunk a rank, got 2; interleaved takes more"),
        ("gpipe", (0, 8, 1), "at least 1 rank"),
    ],
)
def test_sizes_that_cannot_be_are_refused(name, given, message):
    with pytest.raises(ScheduleError, match=message):
        SCHEDULES[name](*given)


def test_a_deadlock_names_the_ops_that_wait_negative_control():
    first = (Op("F", 0, 0), Op("BW", 0, 0), Op("F", 0, 1), Op("BW", 0, 1))
    second = (Op("F", 1, 1), Op("BW", 1, 1), Op("F", 1, 0), Op("BW", 1, 0))
    with pytest.raises(ScheduleError, match=r"deadlocks; waiting: rank 0 at BW0@0, rank 1 at F1@1"):
        Schedule((first, second), ((0, 1),))


def test_missing_and_repeated_ops_are_named():
    own = (Op("F", 0, 0), Op("BW", 0, 0))
    with pytest.raises(ScheduleError, match=r"F1@0 is there 0 times"):
        Schedule(((*own, Op("BW", 0, 1)),), ((0,),))
    with pytest.raises(ScheduleError, match=r"F0@0 is there 2 times"):
        Schedule(((Op("F", 0, 0), *own),), ((0,),))
    with pytest.raises(ScheduleError, match="is on rank 0; its stage is on rank 1"):
        Schedule((own, own), ((1, 0),))


def test_torch_form_is_read(tmp_path):
    """A file in the form of torch's dump gives the schedule that it was written from."""
    made = one_f_one_b(2, 3)
    letter = {"F": "F", "BW": "B"}
    lines = [
        ",".join(f"{o.stage}{letter[o.kind]}{o.microbatch}" for o in own) for own in made.ranks
    ]
    file = tmp_path / "own.csv"
    file.write_text("\n".join([lines[0], "," + lines[1]]) + "\n")  # an idle cell first
    assert read_schedule(file) == made
    file.write_text("0F0,0X0\n")
    with pytest.raises(ScheduleError, match=r"line 1, cell 2: '0X0' is no op"):
        read_schedule(file)
    file.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert read_schedule(file).pairs == (frozenset({1}),)


def test_torch_writes_what_is_read_against_published(tmp_path):
    """ZBV and interleaved 1F1B as torch itself generates and dumps them."""
    pytest.importorskip("torch", reason="needs torch's schedules")
    from torch.distributed.pipelining import _schedule_visualizer, schedules

    for name, theirs in (("zbv", schedules.ScheduleZBVZeroBubble), ("interleaved_1f1b", schedules.ScheduleInterleaved1F1B)):  # fmt: skip
        ops = _schedule_visualizer.get_schedule_ops(theirs, 4, 8, num_stages_per_rank=2)
        ops = list(ops.values()) if isinstance(ops, dict) else ops
        file = tmp_path / f"{name}.csv"
        file.write_text(
            "\n".join(",".join("" if o is None else str(o) for o in own) for own in ops) + "\n"
        )
        assert read_schedule(file).ranks == SCHEDULES[name](4, 8, 2).ranks
