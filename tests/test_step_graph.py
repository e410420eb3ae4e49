"""From a model's shape to the graph of its step: exactness of what is folded, collectives where they belong."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from prism.base import stats
from prism.base.specs import SpecError
from prism.context import analytic, analytic_model, parts
from prism.context.analytic import MemoryShortage
from prism.context.context import (
    Context,
    Parallelism,
    Recommender,
    Topology,
    Workload,
    read_context,
)
from prism.model.coupling import Coupling, Loading
from prism.model.engine.montecarlo import simulate
from prism.model.pools import LogNormal, Scaled

SHAPE = LogNormal.from_moments(1.0, 0.1)


def context(
    model="megatron-22b", topology="dgx-a100", *, sizes=None, machine=None, **how
) -> Context:
    """A small job on a published machine: few layers of a published model."""
    p = Parallelism(**how)
    return Context(
        workload=Workload.preset(model, **({"layers": 4} | (sizes or {}))),
        parallelism=p,
        topology=Topology.preset(
            topology, **({"nodes": p.lanes * p.tp * p.pp // 8} | (machine or {}))
        ),
    )


JOBS = {
    "replicated": {"dp": 4, "tp": 2, "pp": 2, "microbatches": 4},
    "sharded": {"dp": 4, "tp": 2, "pp": 2, "microbatches": 4, "zero": 1},
    "hybrid": {"dp": 4, "tp": 4, "pp": 1, "microbatches": 2, "zero": 3, "shard": 2},
    "late": {"dp": 4, "tp": 2, "pp": 2, "microbatches": 4, "overlap_gradients": False},
    "context": {"dp": 2, "cp": 2, "tp": 2, "pp": 2, "microbatches": 2},
    "interleaved": {"dp": 2, "tp": 2, "pp": 2, "microbatches": 4, "schedule": "interleaved_1f1b"},
    "bidirectional": {"dp": 2, "tp": 2, "pp": 2, "microbatches": 4, "schedule": "dualpipe"},
    "zero bubble": {"dp": 2, "tp": 2, "pp": 2, "microbatches": 4, "schedule": "zb_h1"},
    "recomputed": {"dp": 2, "tp": 2, "pp": 2, "microbatches": 2, "recompute": "full"},
}


@pytest.mark.parametrize("job", JOBS)
def test_lanes_equal_the_graph_written_out_draw_by_draw_invariant(job):
    """With a coupling at every level and one hot replica."""
    ctx = context(**JOBS[job])
    model = analytic_model.model_from_context(ctx, variability=SHAPE)
    kinds = {s.op for s in model.dag.signatures if s.role == "compute"}
    levels = {"step": Loading(0.4), "microbatch": Loading(0.4)}
    model = model.replace(coupling=Coupling(dict.fromkeys(kinds, levels)))
    np.testing.assert_array_equal(steps(model), steps(model.replace(dag=model.dag.unroll())))
    hot = steps(_hot(model, replica=1))
    written = steps(_hot(model.replace(dag=model.dag.unroll()), replica=1))
    np.testing.assert_allclose(hot, written, rtol=1e-14)  # scaled in another order
    assert np.all(hot >= steps(model)) and np.any(hot > steps(model))


def steps(model) -> np.ndarray:
    return simulate(model, 60, seed=3)["step_time"].values


def _hot(model, replica: int):
    """All compute of a replica slower, whether it is a lane or written out."""
    dag = model.dag
    compute = np.array([s.role == "compute" for s in dag.signatures])[dag.signature]
    there = np.arange(dag.lanes) == replica if dag.lanes > 1 else (dag.replica == replica)[:, None]
    return model.override(compute[:, None] & there, lambda op, pool: Scaled(pool, 1.3))


@pytest.mark.parametrize("job", JOBS)
def test_one_op_for_what_follows_each_other_is_exact_without_variance_invariant(job):
    ctx = context(**JOBS[job])
    still = simulate(analytic_model.model_from_context(ctx).at_mean, 1)["step_time"].values[0]
    assert analytic_model.deterministic_step(ctx)(ctx.topology.efficiency) == pytest.approx(
        still, rel=1e-12
    )


def test_folded_tensor_parallel_ranks_are_those_written_out_against_theory():
    """Between two collectives stands one op, so that the largest of eight is what the next one waits for."""
    times = {}
    for fold in (True, False):
        ctx = context(tp=8, microbatches=2, fold_tp=fold, sizes={"layers": 2})
        model = analytic_model.model_from_context(ctx, variability=SHAPE)
        times[fold] = simulate(model, 4000, seed=int(fold))["step_time"].values
    limit = 1.63 * np.sqrt(2 / 4000)
    assert stats.ks_distance(times[True], times[False]) < limit
    alone = context(tp=8, microbatches=2, sizes={"layers": 2})
    model = analytic_model.model_from_context(alone, variability=SHAPE)
    narrow = model.replace(dag=_width_one(model.dag))
    wrong = simulate(narrow, 4000, seed=2)["step_time"].values
    assert stats.ks_distance(wrong, times[False]) > 5 * limit  # one rank is not eight


def _width_one(dag):
    from dataclasses import replace

    return replace(dag, width=np.ones_like(dag.width))


def test_a_step_without_pipeline_is_the_sum_of_its_parts_against_theory():
    ctx = context(tp=8, microbatches=3, microbatch_size=2)
    t = ctx.topology
    step = [p for kind in ("F", "BW") for p in parts.parts(parts.RankView(ctx, 0), kind, 0)]
    once = sum(p.price(t) for p in step)
    weights = analytic.stage_parameters(ctx, 0)
    whole = 3 * once + analytic.optimizer_seconds(t, ctx.parallelism, weights)
    assert analytic_model.deterministic_step(ctx)(t.efficiency) == pytest.approx(whole, rel=1e-9)


def count(dag, role: str) -> int:
    return int(sum(dag.signatures[s].role == role for s in dag.signature))


@pytest.mark.parametrize(
    ("how", "role", "expected"),
    [
        # two blocks a layer and direction; after the embedding, the loss and the loss's gradient
        ({"tp": 8, "microbatches": 3}, "tp", (4 * 2 * 2 + 3) * 3),
        ({"tp": 8, "microbatches": 3, "recompute": "full"}, "tp", (4 * 3 * 2 + 3) * 3),
        # both ways between two stages
        ({"tp": 4, "pp": 2, "microbatches": 3}, "pp", 2 * 3),
        # one reduction a layer and one of the embedding
        ({"dp": 8, "microbatches": 3}, "dp", 4 + 1),
        ({"dp": 8, "microbatches": 3, "zero": 1}, "dp", 4 + 1 + 1),
        # sharded weights: a gather a layer, direction and microbatch as well
        ({"dp": 8, "microbatches": 3, "zero": 3}, "dp", 4 * 2 * 3 + 4 + 1),
        # keys and values forwards, the same and their gradients backwards
        ({"tp": 4, "cp": 2, "microbatches": 3}, "cp", 4 * 3 * 3),
    ],
)
def test_collectives_are_as_many_as_they_should_be_against_theory(how, role, expected):
    assert count(analytic_model.build_dag(context(**how)), role) == expected


def test_experts_are_reached_by_four_exchanges_a_layer_and_reduced_apart():
    ctx = context(
        "mixtral-8x22b", "dgx-h200", dp=8, ep=8, tp=2, microbatches=2, sizes={"layers": 2}, zero=1
    )
    dag = analytic_model.build_dag(ctx)
    assert count(dag, "ep") == 2 * 2 * 2 * 2
    # all experts are spread over all lanes: nobody has the same ones
    assert not any(s.op.startswith("experts-") for s in dag.signatures)
    half = context(
        "mixtral-8x22b", "dgx-h200", dp=8, ep=4, tp=2, microbatches=2, sizes={"layers": 2}, zero=1
    )
    # a reduction a layer, and what is gathered after the optimizer
    assert count(analytic_model.build_dag(half), "dp") == count(dag, "dp") + 2 + 1


def test_more_bandwidth_and_better_placement_never_cost_invariant():
    times = []
    for inter in (12.5e9, 25e9, 50e9):
        machine = {"inter_node": {"bandwidth": inter}}
        ctx = context(dp=8, tp=2, microbatches=2, machine=machine)
        times.append(analytic_model.deterministic_step(ctx)(ctx.topology.efficiency))
    assert times[0] > times[1] > times[2]


def test_oversubscribed_pods_are_left_out_by_rails_and_by_neighbours():
    """Ranks 0, 8, 16, 24 sit at one place of four nodes in two pods."""
    base = {"nodes_per_pod": 2, "oversubscription": 4.0}
    plain, rails = (Topology.preset("dgx-a100", nodes=4, rails=r, **base) for r in (False, True))
    across, within = [0, 8, 16, 24], [0, 8]
    free = analytic.route(Topology.preset("dgx-a100", nodes=4), across).bandwidth
    assert analytic.route(plain, across).bandwidth == pytest.approx(free / 4)
    assert analytic.route(rails, across).bandwidth == pytest.approx(free)
    assert analytic.route(plain, within).bandwidth == pytest.approx(free)
    mixed = [0, 9, 16, 25]
    assert analytic.route(rails, mixed).bandwidth == pytest.approx(free / 4)


@pytest.mark.parametrize(
    ("n", "size"), [(2, 1e3), (8, 1e6), (64, 1e9)]
)  # fmt: skip
def test_collectives_against_theory(n, size):
    r = analytic.Route(n, 1e-5, 1e10, False, 0.0)
    ring = 2 * (n - 1) * 1e-5 + 2 * (n - 1) / n * size / 1e10
    tree = 2 * np.ceil(np.log2(n)) * 1e-5 + 2 * size / 1e10
    assert analytic.all_reduce(r, size) == pytest.approx(min(ring, tree))
    assert analytic.all_gather(r, size) == pytest.approx((n - 1) * 1e-5 + (n - 1) / n * size / 1e10)


def test_layers_may_be_fewer_at_both_ends():
    ctx = context("llama3-405b", "dgx-h200", tp=8, pp=16, dp=1, microbatches=16, zero=0, recompute="full",
                  sizes={"layers": 126})  # fmt: skip
    assert ctx.layers_of_stage == (7, *(8,) * 14, 7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload.preset("lama3-70b"), "no preset 'lama3-70b'; near it: llama3-70b"),
        (lambda: Topology.preset("dgx-h10", nodes=1), "near it: dgx-h100"),
        (lambda: context(tp=8, pp=3, microbatches=6, sizes={"layers": 48}, machine={"nodes": 2}), "24 ranks, but 2 nodes x 8 GPUs = 16"),
        (lambda: context(tp=8, pp=7, microbatches=7, sizes={"layers": 48}), "48 layers .* do not divide by 7 virtual stages; .*6.* do"),
        (lambda: context(tp=8, sizes={"heads": 12, "head_dim": 64}), "heads 12 does not divide by tp 8; 1, 2, 4 do"),
        (lambda: Parallelism(dp=4, ep=3), "ep 3 does not divide dp x cp = 4; 1, 2, 4 do"),
        (lambda: Parallelism(dp=4, shard=2), "shard 2 needs zero 1, 2 or 3"),
        (lambda: Parallelism(schedule="1f1c"), "schedule: '1f1c' is not one of"),
        (lambda: Parallelism(pp=4, microbatches=6, schedule="interleaved_1f1b"), "multiple of 4 microbatches, got 6"),
        (lambda: context(tp=16, microbatches=1, sizes={"layers": 4}), "tp 16 does not fill nodes of 8 GPUs, so that its groups differ: set fold_tp to false"),
        (lambda: context(tp=8, cp=3, sizes={"sequence": 2048}), "a sequence of 2048 does not divide by cp 3"),
    ],
)  # fmt: skip
def test_specs_that_cannot_be_say_what_can(make, message):
    with pytest.raises(ValidationError, match=message):
        make()


def test_a_model_that_does_not_fit_says_by_how_much_and_what_would():
    ctx = context("gpt3-175b", tp=8, sizes={"layers": 24})
    with pytest.raises(
        MemoryShortage, match=r"stage 0 needs .* GB too much; .*or zero|stage 0 needs .* needed"
    ):
        analytic_model.model_from_context(ctx)
    wide = context("gpt3-175b", tp=8, dp=8, sizes={"layers": 24})
    with pytest.raises(MemoryShortage, match=r"zero: 1 or zero: 2 or zero: 3.* would do"):
        analytic_model.model_from_context(wide)


def test_a_spec_file_names_presets_and_changes_them(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "workload: {preset: llama3-8b, layers: 16}\n"
        "parallelism: {dp: 4, tp: 4, microbatches: 2, zero: 1}\n"
        "topology: {preset: dgx-h100, nodes: 2, inter_node: {latency: 1.0e-5}}\n"
    )
    ctx = read_context(file)
    assert ctx.workload.layers == 16 and ctx.workload.hidden == 4096
    assert ctx.topology.inter_node.latency == 1e-5 and ctx.topology.inter_node.bandwidth == 50e9
    file.write_text(file.read_text().replace("llama3-8b", "llama"))
    with pytest.raises(SpecError, match=r"workload: no preset 'llama'; near it: .*llama3") as fault:
        read_context(file)
    assert "\n" not in str(fault.value)


def recommender(gpus: int, **how) -> Context:
    return Context(
        workload=Recommender.preset("dlrm-mlperf"),
        parallelism=Parallelism(dp=gpus, **how),
        topology=Topology.preset("dgx-v100", nodes=gpus // 8),
    )


def test_a_recommender_exchanges_rows_both_ways_and_reduces_what_is_dense():
    ctx = recommender(16)
    dag = analytic_model.build_dag(ctx)
    names = [dag.signatures[s].op for s in dag.signature]
    assert names.count("all-to-all") == 2 and names.count("all-reduce") == 1
    assert names.count("lookup-forward") == 1
    # every rank serves all samples in its share of the tables: the same work at any size
    rows = {s.op: s.shape for s in dag.signatures if s.op.startswith("lookup")}
    other = {
        s.op: s.shape for s in analytic_model.build_dag(recommender(64)).signatures if s.op in rows
    }
    assert rows == other
    assert 1e-3 < analytic_model.deterministic_step(ctx)(ctx.topology.efficiency) < 0.1
    with pytest.raises(ValidationError, match="a recommender spreads its tables over dp"):
        recommender(16, zero=1)


def test_tables_that_do_not_fit_are_refused():
    small = recommender(16).model_copy(update={"parallelism": Parallelism(dp=1)})
    with pytest.raises(MemoryShortage):
        analytic.check_memory(small)


def test_a_schedule_from_a_file_is_the_same_as_by_name(tmp_path):
    plan = Parallelism(pp=2, microbatches=4).plan
    file = tmp_path / "own.csv"
    letter = {"F": "F", "BW": "B"}
    file.write_text(
        "\n".join(
            ",".join(f"{o.stage}{letter[o.kind]}{o.microbatch}" for o in own) for own in plan.ranks
        )
    )
    read, named = (context(tp=4, pp=2, microbatches=4, schedule=s) for s in (str(file), "1f1b"))
    times = [analytic_model.deterministic_step(c)(c.topology.efficiency) for c in (read, named)]
    assert times[0] == times[1]
    with pytest.raises(ValidationError, match="2 ranks and 4 microbatches; pp is 4"):
        Parallelism(pp=4, microbatches=4, schedule=str(file))
    with pytest.raises(ValidationError, match="no such file"):
        Parallelism(schedule="none.csv")


def test_a_changed_copy_has_its_own_plan():
    p = Parallelism(pp=2, microbatches=4)
    assert p.plan.microbatches == 4
    assert p.model_copy(update={"microbatches": 6}).plan.microbatches == 6


def test_experts_are_sharded_among_those_who_hold_the_same_against_theory():
    """ep 8 of dp 8: nobody else has them, so ZeRO divides nothing of theirs. ep 4: two do."""
    for ep, holders in ((8, 1), (4, 2)):
        ctx = context("mixtral-8x22b", "dgx-h200", dp=8, ep=ep, tp=1, sizes={"layers": 2}, zero=3)
        w = ctx.workload
        experts = 2 * w.experts / ep * w.feed_forward_parameters
        dense = analytic.stage_parameters(ctx, 0) - experts
        kept = ctx.parallelism.plan.peak_activations()[0] * 2 * analytic.activation_bytes(w, ctx.parallelism)  # fmt: skip
        gradients = 4.0 / (8 if ctx.parallelism.microbatches == 1 else 1)
        theirs = 4.0 / (holders if ctx.parallelism.microbatches == 1 else 1)
        want = dense * (14 / 8 + gradients) + experts * (14 / holders + theirs) + kept
        assert analytic.memory_bytes(ctx)[0] == pytest.approx(want, rel=1e-9)
        names = {s.op for s in analytic_model.build_dag(ctx).signatures}
        assert ("experts-reduce-scatter" in names) == (holders > 1)
        assert ("experts-all-gather" in names) == (holders > 1)


def test_each_stage_is_priced_by_its_own_groups():
    """3 replicas x 2 slices x 4 stages on 3 nodes of 8: replicas of stages 1 and 2 straddle nodes, those of 0 and 3 do not."""
    ctx = context("llama3-8b", "dgx-h100", dp=3, tp=2, pp=4, microbatches=4, sizes={})
    dag = analytic_model.build_dag(ctx)
    of = {}
    for op in range(dag.n_ops):
        s = dag.signatures[dag.signature[op]]
        if s.role == "dp":
            of.setdefault(int(dag.stage[op]), set()).add(s.scope)
    assert of == {0: {"intra_node"}, 1: {"inter_node"}, 2: {"inter_node"}, 3: {"intra_node"}}
    model = analytic_model.model_from_context(ctx)
    dear = {k.signature.scope: p.mean for k, p in model.pools.items() if k.signature.role == "dp"}
    assert dear["inter_node"] > 3 * dear["intra_node"]


def test_one_stage_reduces_both_ends_unless_they_are_tied():
    for tied, n in ((False, 2), (True, 1)):
        ctx = context("llama3-8b", "dgx-h100", dp=8, sizes={"layers": 2, "tied_embeddings": tied})
        (part,) = parts.end_gradients(parts.RankView(ctx, 0), [0])
        assert part.size == 4 * n * ctx.workload.embedding_parameters


def test_what_stays_in_a_node_does_not_wait_for_the_network_against_theory():
    """All-to-all over 2 nodes of 8: half of the bytes leave."""
    t = Topology.preset("dgx-h100", nodes=2)
    r = analytic.route(t, range(16), ring=False)
    want = 15 * r.latency + 1e9 * 8 / 16 / r.bandwidth
    assert analytic.all_to_all(r, 1e9) == pytest.approx(want)


def test_more_slices_than_heads_of_keys_hold_copies():
    p8, p16 = (Parallelism(tp=t, pp=1, microbatches=1, sequence_parallel=True) for t in (8, 16))
    w = Workload.preset("llama3-70b")
    assert analytic.keys_on_rank(w, p8) == analytic.keys_on_rank(w, p16) == 1.0
    with pytest.raises(ValueError, match="one has to divide the other"):
        context(
            "llama3-8b",
            "dgx-h100",
            dp=2,
            tp=4,
            sizes={"kv_heads": 6, "heads": 36, "hidden": 4608, "layers": 2},
        )


def test_slices_that_do_not_fill_nodes_are_written_out():
    with pytest.raises(ValueError, match="does not fill nodes of 8 GPUs"):
        context("gpt3-175b", "dgx-h100", dp=1, tp=6, pp=4, microbatches=4, sizes={"layers": 4})
