"""Recording a real training loop of two ranks on the CPU. Needs torch, and skips without it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from prism.traces import build_graph, observe, read_trace, replay

pytest.importorskip("torch", reason="recording is tested where torch is installed")

LOOP = """
import sys, torch, torch.distributed as dist
from prism.traces import record

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
with record(f"{folder}/traces", steps=6, skip=2) as profile:
    for _ in range(10):
        model(torch.randn(64, 256)).square().sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        profile.step()
dist.destroy_process_group()
"""


# a busy machine may make clocks look off, or steps unlike: said, and no fault of the recording
@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
def test_two_ranks_of_gloo_are_recorded_and_read(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(textwrap.dedent(LOOP))
    ranks = [subprocess.Popen([sys.executable, script, str(r), tmp_path]) for r in (0, 1)]
    assert [p.wait(timeout=120) for p in ranks] == [0, 0]
    trace = read_trace(tmp_path / "traces")
    assert trace.sizes["step"] == 6
    reduces = (trace["name"].values == "all_reduce") & (trace["rank"].values == 0)
    assert reduces.sum() == 4
    graph = build_graph(trace)
    observed = observe(trace, graph)
    # other work on the machine holds processes up between the end of a transfer and its record
    error = replay(observed).relative_error
    assert np.median(np.abs(error)) < 0.25
    joined = graph.op_of_record[trace["name"].values == "all_reduce"]
    assert len(set(joined)) == 4 and np.all(observed.duration[:, joined] > 0)
