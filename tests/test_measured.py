"""Models from isolated measurements: pools at measured sizes, between them, and beyond, each said."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import prism
from prism.base import schema
from prism.context.measured_model import Curve, model_from_measurements
from prism.measure import fleet
from prism.measure.collectives import read_collectives
from prism.model.engine.montecarlo import simulate

RATE, OVERHEAD = 4e14, 5e-6


def products(flop, devices=40, trials=60, spatial=0.03, temporal=0.01):
    rng = np.random.default_rng(0)
    flop = np.asarray(flop, float)
    gpu = 1 + spatial * rng.standard_normal((1, devices, 1))
    noise = temporal * rng.standard_normal((flop.size, devices, trials))
    return schema.dataset(
        {"duration": (("signature", "gpu", "trial"), (flop / RATE + OVERHEAD)[:, None, None] * (gpu + noise))},
        coords={"signature": [f"gemm {f:g}" for f in flop], "flop": ("signature", flop), "gpu": [f"g{i}" for i in range(devices)]},
        made_by="test", source="measured",
    )  # fmt: skip


def context(**changes):
    given = {"dp": 2, "tp": 1, "pp": 2, "microbatches": 4} | changes
    gpus = given["dp"] * given["tp"] * given["pp"]
    return prism.Context(
        workload=prism.Workload.preset("llama3-8b"),
        parallelism=prism.Parallelism(**given, recompute="full"),
        topology=prism.Topology.preset("dgx-h100", nodes=max(1, gpus // 8))
        if gpus >= 8
        else prism.Topology.preset("dgx-h100", nodes=1, gpus_per_node=gpus),
    )


def test_a_curve_returns_what_was_measured_and_lies_between_against_theory():
    """A start-up time and a rate, whatever the distance of the measured sizes."""
    curve = Curve(np.array([1.0, 100.0]), np.array([[1.0, 2.0], [10.9, 21.8]]))
    for size in (1.0, 10.0, 50.0, 100.0, 1000.0):
        got, reach = curve.at(size)
        np.testing.assert_allclose(got, [0.9 + 0.1 * size, 1.8 + 0.2 * size])
        assert reach == (10.0 if size == 1000.0 else 1.0)
    assert curve.at(0.1)[1] == pytest.approx(0.1)
    alone, reach = Curve(np.array([10.0]), np.array([[1.0, 2.0]])).at(20.0)
    assert alone.tolist() == [2.0, 4.0] and reach == 2.0


def test_mixtures_are_not_a_distribution():
    both = xr.concat([products([1e9]), products([1e10])], "signature", combine_attrs="override")
    mixed = both.assign_coords(dtype=("signature", ["float32", "bfloat16"]))
    with pytest.raises(ValueError, match="gemm holds products in bfloat16, float32: select one"):
        model_from_measurements(context(), gemm=mixed)
    model_from_measurements(context(), gemm=mixed.isel(signature=mixed.dtype == "float32"))
    quiet = transfers(4, (1 << 10, 1 << 20))
    noisy = xr.concat([quiet, quiet], "signature", combine_attrs="override")
    with pytest.raises(ValueError, match="several configurations of allreduce, 4 ranks, 1024 B"):
        model_from_measurements(context(), collectives=noisy)
    with pytest.raises(ValueError, match="do not say their ranks"):
        model_from_measurements(context(), collectives=quiet.drop_vars("ranks"))


def test_slices_that_are_put_together_take_their_time():
    sent = transfers(2, (1 << 10, 1 << 28), "send_recv", "inter_node")
    extra = {}
    for split in (True, False):
        ctx = context(dp=2, tp=4, pp=2).with_parallelism(sequence_parallel=split)
        model, _ = model_from_measurements(ctx, collectives=sent)
        extra[split] = next(p.mean for k, p in model.pools.items() if k.signature.op == "send-recv")
    assert extra[False] > 1.2 * extra[True]


def test_pools_are_the_measured_products_against_theory():
    ctx = context()
    model, found = model_from_measurements(ctx, gemm=products(np.geomspace(1e9, 1e13, 9)))
    how = dict(zip(found["signature"].values.tolist(), found["how"].values.tolist(), strict=True))
    compute = [n for n in how if n.startswith(("attention", "feed-forward", "head"))]
    assert {how[n] for n in compute} == {"interpolated"}
    assert {how[n] for n in how if "all-reduce" in n or n.startswith("send")} == {"analytic"}
    for key, pool in model.pools.items():
        if str(key.signature).startswith("feed-forward"):
            # devices differ by 3 %, trials by 1 %
            assert pool.cv == pytest.approx(np.hypot(0.03, 0.01), rel=0.35)
    share = model.coupling.loadings["feed-forward-forward"]["rank"].persistent ** 2
    assert share == pytest.approx(0.9, abs=0.08)
    assert model.source == "synthetic"
    step = simulate(model, 50, jobs=30)["step_time"]
    # some GPUs of a job are slow in every step of it
    assert float(step.mean("draw").std()) > 2 * float(step.std("draw").mean()) / np.sqrt(50)


def test_a_mean_is_the_sum_of_its_products_against_theory():
    """Where the line through measured points is the truth, so is the op: products at rate and overhead."""
    from prism.context.step_graph import StepGraph

    ctx = context()
    _, found = model_from_measurements(ctx, gemm=products(np.geomspace(1e8, 1e14, 200), spatial=1e-6, temporal=1e-6))  # fmt: skip
    for signature, part in StepGraph(ctx).parts.items():
        if part.work is None or part.work.flops == 0:
            continue
        flops = part.work.products + part.work.scores
        memory = part.work.traffic / (
            ctx.topology.efficiency.memory * ctx.topology.gpu.memory_bandwidth
        )
        want = sum(f / RATE + OVERHEAD for f in flops) + memory
        mean = float(found["pool_mean"].sel(signature=str(signature)))
        assert mean == pytest.approx(want, rel=2e-3)


def test_what_reaches_beyond_is_said():
    _, found = model_from_measurements(context(), gemm=products([1e9, 1e10]))
    beyond = found.isel(signature=found["how"].values == "extrapolated")
    assert beyond.sizes["signature"] > 0 and (beyond["reach"] > 10).all()


def transfers(ranks, sizes, kind="all_reduce", scope="intra_node"):
    rng = np.random.default_rng(1)
    rows = np.array([(2e-5 + s / 3e11) * rng.lognormal(0, 0.2, 400) for s in sizes])
    n = len(sizes)
    return schema.dataset(
        {"duration": (("signature", "trial"), rows)},
        coords={"signature": [f"{kind} {s}" for s in sizes], "collective": ("signature", [kind] * n), "message_bytes": ("signature", list(sizes)),
                "ranks": ("signature", [ranks] * n), "scope": ("signature", [scope] * n)},
        made_by="test", source="measured",
    )  # fmt: skip


def test_collectives_take_their_own_ranks_and_say_when_they_take_others():
    ctx = context(dp=1, tp=4, pp=2)
    for ranks, way in ((4, {"interpolated", "extrapolated"}), (8, {"other ranks"})):
        model, found = model_from_measurements(
            ctx, collectives=transfers(ranks, (1 << 10, 1 << 20, 1 << 28))
        )
        of = {
            str(w)
            for n, w in zip(found["signature"].values, found["how"].values, strict=True)
            if "tp-all-reduce" in str(n)
        }
        assert of <= way and of
        pool = next(p for k, p in model.pools.items() if k.signature.op == "tp-all-reduce")
        assert pool.cv == pytest.approx(0.2, rel=0.2)


def test_a_real_fleet_and_our_own_bench_make_a_model(root):
    gemm = fleet.read_fleet(root / "inputs/bench/gemm")
    collectives = read_collectives(root / "inputs/bench/collective-4")
    model, found = model_from_measurements(context(), gemm=gemm, collectives=collectives)
    assert {"extrapolated", "analytic"} <= set(found["how"].values.tolist())
    assert float(simulate(model, 20)["step_time"].min()) > 0


def test_what_cannot_be_measured_is_refused(root):
    with pytest.raises(ValueError, match="nothing measured"):
        model_from_measurements(context())
    from prism.context.context import read_context

    with pytest.raises(ValueError, match="stage times know nothing of products"):
        model_from_measurements(read_context(root / "inputs/small_step.yaml"), gemm=products([1e9]))
    without = products([1e9]).drop_vars("flop")
    with pytest.raises(ValueError, match="columns m, n and k"):
        model_from_measurements(context(), gemm=without)
