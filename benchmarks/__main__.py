"""Print a table of ratios: ``python -m benchmarks [name ...]``.

Every row is a ratio measured in this run against something that anyone can run again; machines differ,
ratios less so. Best of several repetitions, since other work on the machine can only make it slower.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import graphs, profiler_file
from prism import cluster
from prism.cluster.jobs import ReferenceJobs, synthetic_jobs
from prism.context.analytic_model import model_from_context
from prism.context.context import Context, Parallelism, Topology, Workload
from prism.model.coupling import Coupling
from prism.model.engine.montecarlo import propagate, simulate
from prism.model.pools import Empirical, LogNormal
from prism.model.signature import PoolKey, Signature
from prism.model.step_model import StepModel
from prism.traces import build_graph, read_trace
from prism.traces.profiler.events import read_kineto

FOUR_LEVELS = {"step": 0.4, "node": 0.3, "rank": 0.5, "microbatch": 0.4}


def best(work: Callable[[], object], repetitions: int = 5) -> float:
    """Least wall time of several repetitions, seconds."""
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def row(name: str, value: float, unit: str, bar: float, against: str) -> None:
    verdict = "" if np.isnan(bar) else f"   bar {bar:g}: {'met' if value <= bar else 'MISSED'}"
    print(f"{name:<44}{value:>10.4g} {unit:<22}{verdict}   ({against})", flush=True)


def draws_per_op() -> None:
    """One op-draw on one core, against one draw of numpy.random.Generator.lognormal."""
    rng = np.random.default_rng(0)
    dag = graphs.kernels_1f1b(8, 16, 8)
    n = 16_384
    samples = Empirical(tuple(rng.lognormal(0.0, 0.3, 1000)))
    cases = {
        "op-draw, empirical": (samples, {}, 0.12),
        "op-draw, parametric": (LogNormal(0.0, 0.3), {}, 0.2),
        "op-draw, four levels, empirical": (samples, {"kernel": FOUR_LEVELS}, 0.4),
        "op-draw, four levels, parametric": (LogNormal(0.0, 0.3), {"kernel": FOUR_LEVELS}, 0.4),
    }
    for name, (pool, loadings, bar) in cases.items():
        model = StepModel(dag, {PoolKey(Signature("kernel")): pool}, Coupling(loadings))
        simulate(model, 10)
        ours, numpy = np.inf, np.inf
        for _ in range(7):  # in turns, so that both meet the same machine
            ours = min(ours, best(lambda m=model: simulate(m, n, threads=1), 1) / (n * dag.n_ops))
            numpy = min(numpy, best(lambda: rng.lognormal(0.0, 0.3, 1_000_000), 1) / 1_000_000)
        row(
            name,
            ours / numpy,
            "x numpy lognormal",
            bar,
            f"{1e9 * ours:.2f} ns / {1e9 * numpy:.2f} ns",
        )


def replay() -> None:
    """Deterministic replay of a million ops, against networkx and others on the same graph."""
    from benchmarks import peers  # networkx would count in the memory of the other rows

    for kernels in (98, 980):
        dag = graphs.kernels_1f1b(8, 64, kernels)
        duration = np.random.default_rng(0).lognormal(np.log(1e-4), 0.3, dag.n_ops)
        expected = float(propagate(dag, duration[:, None])[1].max())
        ours = best(lambda d=dag, t=duration: propagate(d, t[:, None]))
        graph = peers.networkx_graph(dag, duration)
        assert np.isclose(peers.networkx_replay(graph), expected)
        nx = best(lambda g=graph: peers.networkx_replay(g), 2)
        row(
            f"replay, {dag.n_ops:,} ops",
            ours / nx,
            "x networkx",
            0.01,
            f"{ours:.4f} s / {nx:.2f} s",
        )
        del graph
        successors, waiting = peers.lists(dag)
        times = duration.tolist()
        plain = best(lambda a=successors, b=waiting, t=times: peers.list_replay(a, b, t), 2)
        row(f"replay, {dag.n_ops:,} ops", ours / plain, "x plain lists", np.nan, f"{plain:.2f} s")
        if kernels == 98:
            simpy = best(lambda d=dag, t=times: peers.simpy_replay(d, t), 2)
            row(f"replay, {dag.n_ops:,} ops", ours / simpy, "x SimPy", np.nan, f"{simpy:.2f} s")


def monte_carlo() -> None:
    """A hundred thousand ops, 1000 draws, one core, against numpy over the draws."""
    from benchmarks import peers

    dag = graphs.kernels_1f1b(8, 64, 98)
    mu = np.log(1e-4)
    model = StepModel(dag, {PoolKey(Signature("kernel")): LogNormal(mu, 0.3)})
    simulate(model, 10)
    ours = best(lambda: simulate(model, 1000, threads=1), 2)
    numpy = best(lambda: peers.numpy_monte_carlo(dag, mu, 0.3, 100, 0), 1) * 10
    row(f"{dag.n_ops:,} ops x 1000 draws, one core", ours / numpy, "x numpy over draws", np.nan,
        f"{ours:.2f} s / {numpy:.1f} s, numpy from 100 draws")  # fmt: skip


def memory() -> None:
    """A million ops x 1000 draws: peak memory of a process of its own."""
    code = "from benchmarks.__main__ import million; million()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    peak, seconds = map(float, ran.stdout.split())
    row("1 M ops x 1000 draws, whole process", peak, "MB peak", 400, f"{seconds:.1f} s, all cores")


def peak_mb() -> float:
    """Peak memory of this process. (`getrusage` would also count the parent that started it.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return float("nan")


def million() -> None:
    dag = graphs.kernels_1f1b(8, 64, 980)
    model = StepModel(dag, {PoolKey(Signature("kernel")): LogNormal(np.log(1e-4), 0.3)})
    begin = time.perf_counter()
    simulate(model, 1000)
    print(peak_mb(), time.perf_counter() - begin)


def scale() -> None:
    """65,536 GPUs, 1000 draws, all cores: independent, and with step and microbatch coupling."""
    for name, bar in (("independent", 30), ("coupled", 90)):
        code = f"from benchmarks.__main__ import large; large({name == 'coupled'})"
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        seconds, peak, op_draws = map(float, ran.stdout.split())
        row(f"65,536 GPUs x 1000 draws, {name}", seconds, "s", bar, f"{op_draws:.3g} op-draws")
        row(f"65,536 GPUs x 1000 draws, {name}", peak, "MB peak", 1000, "whole process")


def large(coupled: bool) -> None:
    shared = {"step": 0.3, "microbatch": 0.4, "communication_step": 0.4} if coupled else {}
    ctx = Context(
        workload=Workload.preset("llama3-405b"),
        parallelism=Parallelism(
            dp=512, tp=8, pp=16, microbatches=16, zero=2, sequence_parallel=True
        ),
        topology=Topology.preset("h100-roce", nodes=8192),
        variability={"compute_cv": 0.03, **shared},
    )
    model = model_from_context(ctx)
    simulate(model, 2)
    begin = time.perf_counter()
    simulate(model, 1000)
    seconds = time.perf_counter() - begin
    print(seconds, peak_mb(), model.dag.n_ops * model.dag.lanes * 1000)


def reading() -> None:
    """A profiler file of 100 MB (synthetic) to columns, against a bare decode into the same structs."""
    with tempfile.TemporaryDirectory() as folder:
        path = profiler_file.write(Path(folder) / "rank0.json", 100 << 20)
        ours, bare = np.inf, np.inf
        for _ in range(5):  # in turns
            ours = min(ours, best(lambda: read_kineto(path), 1))
            bare = min(bare, best(lambda: profiler_file.bare_decode(path), 1))
        row("profiler JSON, 100 MB, to columns", ours / bare, "x bare msgspec decode", 1.5,
            f"{ours:.2f} s / {bare:.2f} s")  # fmt: skip
        code = f"from benchmarks.__main__ import read_once; read_once({str(path)!r})"
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        before, peak, size = map(float, ran.stdout.split())
        row("profiler JSON, memory beyond imports", (peak - before) / size, "x size of the file", 4,
            f"{peak - before:.0f} MB / {size:.0f} MB")  # fmt: skip
        graph = best(lambda: build_graph(read_trace(path)), 1)
        row("profiler JSON, 100 MB, to the graph", graph, "s", np.nan, "one step, one rank")


def read_once(path: str) -> None:
    before = peak_mb()
    read_kineto(Path(path))
    print(before, peak_mb(), Path(path).stat().st_size / 2**20)


def scheduling() -> None:
    """Synthetic logs of the size of Arena's and of Philly's, 1,280 GPUs, 2000 rounds."""
    machine = cluster.Cluster(1280)
    for jobs, gap, hours, bar in ((986, 608.0, 26.0, 1.0), (27_000, 22.2, 0.7, 3.0)):
        log = synthetic_jobs(
            ReferenceJobs(
                kind="synthetic jobs", jobs=jobs, mean_interarrival_s=gap, median_duration_s=3600 * hours,
                duration_log_sigma=1.5, gpus={1: 3.0, 4: 1.0, 8: 1.0}, seed=1,
            )
        )  # fmt: skip
        for policy in ("FCFS", "EASY", "SRTF", "Arena*"):
            seconds = best(lambda p=policy, j=log: cluster.run_cluster(j, machine, p), 2)
            row(f"{jobs} jobs, 2000 rounds, {policy}", seconds, "s", bar, f"load {cluster.offered_load(log, machine):.2f}")  # fmt: skip


ALL = {
    f.__name__: f for f in (draws_per_op, replay, monte_carlo, memory, scale, reading, scheduling)
}

if __name__ == "__main__":
    for name in sys.argv[1:] or ALL:
        ALL[name]()
