"""Job logs in the forms that others publish, as rows with ``job_id, submit_s, gpus, duration_s``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from prism.base.tables import TableError, numbers, one_line, read_table

#: a JSON log is read whole
LARGEST_JSON = 1024**3
#: columns of PAI's task table, which has no header (clusterdata, gpu-v2020)
PAI = ("job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu", "gpu_type")  # fmt: skip


def read(path: Path) -> tuple[pd.DataFrame, dict[str, int]]:
    """Rows of a log, and how many were left out for which reason.

    Raises
    ------
    TableError
        Files that cannot be read; forms that say no duration.
    """
    if path.suffix == ".json":
        return _philly(path)
    table = read_table(path, ("job_id",))
    columns = set(map(str, table.columns))
    for needed, reader in FORMS:
        if needed <= columns:
            return reader(table, path)
    if columns >= {"num_iteration", "gpu_type", "num_gpu"}:
        raise TableError(
            f"{path}: an Arena log says iterations and no durations; these need its profiles of models on GPUs"
        )
    if len(columns) == len(PAI) and "job_id" not in columns:
        return _pai(path)
    if len(columns) == 5 and "job_id" not in columns:
        return _blox(path)
    return _with_types(table), {}


def _with_types(table: pd.DataFrame) -> pd.DataFrame:
    """The tidy form; a model called ``bert__2.6B/bs256/a40`` says its type of GPU."""
    if "gpu_type" not in table and "model" in table:
        parts = table["model"].astype("string").str.split("/")
        if (parts.str.len() == 3).fillna(False).all():
            return table.assign(gpu_type=parts.str[2])
    return table


def _kept(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, int]]:
    """Jobs that asked for GPUs and ran."""
    ran = (table["gpus"] > 0) & (table["duration_s"] > 0)
    return table[ran].reset_index(drop=True), {"without_gpus_or_run": int((~ran).sum())}


def _stamps(cells: pd.Series, path: Path, column: str) -> np.ndarray:
    try:
        at = pd.to_datetime(cells, format="mixed")
    except (ValueError, TypeError) as fault:
        raise TableError(f"{path}: {column} are no time stamps: {one_line(fault)}") from fault
    return (at - at.min()).dt.total_seconds().to_numpy()


def _sia(table: pd.DataFrame, path: Path):
    """``timestamp, duration, num_gpus``: Philly as Sia and Pollux ship it, seconds."""
    out = pd.DataFrame({"submit_s": _stamps(table["timestamp"], path, "timestamp"), "gpus": numbers(table, "num_gpus", path), "duration_s": numbers(table, "duration", path)})  # fmt: skip
    return _kept(out.assign(job_id=[f"job-{i:06d}" for i in range(len(out))]))


def _muri(table: pd.DataFrame, path: Path):
    """``submit_time, duration, interval, iteration_time``: milliseconds."""
    out = pd.DataFrame({"submit_s": numbers(table, "submit_time", path) / 1e3, "gpus": numbers(table, "num_gpu", path), "duration_s": numbers(table, "duration", path) / 1e3})  # fmt: skip
    return _kept(out.assign(job_id=table["job_id"].astype(str)))


def _tiresias(table: pd.DataFrame, path: Path):
    """``submit_time, duration, interval``: seconds. ElasticFlow's has ``real_duration`` too."""
    took = "real_duration" if "real_duration" in table else "duration"
    out = pd.DataFrame({"submit_s": numbers(table, "submit_time", path), "gpus": numbers(table, "num_gpu", path), "duration_s": numbers(table, took, path)})  # fmt: skip
    return _kept(out.assign(job_id=table["job_id"].astype(str)))


def _arena_row(table: pd.DataFrame, path: Path):
    """``submission_time, duration``: an Arena log that says durations."""
    out = pd.DataFrame({"submit_s": numbers(table, "submission_time", path), "gpus": numbers(table, "num_gpu", path), "duration_s": numbers(table, "duration", path)})  # fmt: skip
    return _kept(out.assign(job_id=table["job_id"].astype(str)))


def _helios(table: pd.DataFrame, path: Path):
    """``gpu_num, submit_time, duration``: Helios' cluster_log.csv, time stamps and seconds."""
    out = pd.DataFrame({"submit_s": _stamps(table["submit_time"], path, "submit_time"), "gpus": numbers(table, "gpu_num", path, empty=True), "duration_s": numbers(table, "duration", path, empty=True)})  # fmt: skip
    out[["gpus", "duration_s"]] = out[["gpus", "duration_s"]].fillna(0)
    return _kept(out.assign(job_id=table["job_id"].astype(str)))


def _blox(path: Path):
    """No header: job, model, submission, duration, GPUs; seconds."""
    table = pd.read_csv(path, names=["job_id", "model", "submit_s", "duration_s", "gpus"])
    for column in ("submit_s", "duration_s", "gpus"):
        numbers(table, column, path)
    return _kept(table.assign(job_id=table["job_id"].astype(str)))


def _pai(path: Path):
    """No header: Alibaba PAI's task table; a job is its tasks together, GPUs are per cent of one."""
    table = pd.read_csv(path, names=list(PAI))
    for column in ("inst_num", "start_time", "end_time", "plan_gpu"):
        table[column] = numbers(table, column, path, empty=True)
    table["gpus"] = np.ceil(table["plan_gpu"].fillna(0) / 100) * table["inst_num"].fillna(0)
    jobs = table.groupby("job_name", sort=False).agg(
        submit_s=("start_time", "min"), end=("end_time", "max"), gpus=("gpus", "sum"), done=("end_time", lambda e: e.notna().all())
    )  # fmt: skip
    jobs["duration_s"] = np.where(jobs["done"], jobs["end"] - jobs["submit_s"], 0.0)
    return _kept(jobs.reset_index(names="job_id").fillna(0))


def _philly(path: Path):
    """Philly's cluster_job_log: a list of jobs with attempts, each on machines with GPUs. A job's duration is the time of all its
    attempts."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise TableError(f"{path}: larger than {LARGEST_JSON >> 20} MiB")
        log = json.loads(path.read_text("utf-8"))
        rows = [
            (str(job["jobid"]), job["submitted_time"], *_attempts(job["attempts"])) for job in log
        ]
    except OSError as fault:
        raise TableError(f"{path}: not readable: {one_line(fault)}") from fault
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise TableError(f"{path}: not a job log of Philly: {fault!r}") from fault
    if not rows:
        raise TableError(f"{path}: holds no jobs")
    table = pd.DataFrame(rows, columns=["job_id", "submitted", "gpus", "duration_s"])
    return _kept(table.assign(submit_s=_stamps(table["submitted"], path, "submitted_time")))


def _attempts(attempts: list[dict]) -> tuple[int, float]:
    """GPUs of the largest attempt, and seconds of all that began and ended."""
    gpus, seconds = 0, 0.0
    for attempt in attempts:
        begin, end = attempt.get("start_time"), attempt.get("end_time")
        if begin and end and "None" not in (begin, end):
            seconds += (pd.Timestamp(end) - pd.Timestamp(begin)).total_seconds()
            gpus = max(gpus, sum(len(m["gpus"]) for m in attempt["detail"]))
    return gpus, seconds


Reader = Callable[[pd.DataFrame, Path], tuple[pd.DataFrame, dict[str, int]]]
#: columns that tell a form, the most particular first
FORMS: tuple[tuple[set[str], Reader], ...] = (
    ({"timestamp", "duration", "num_gpus"}, _sia),
    ({"job_id", "num_gpu", "submit_time", "duration", "iteration_time"}, _muri),
    ({"job_id", "num_gpu", "submit_time", "duration"}, _tiresias),
    ({"job_id", "num_gpu", "submission_time", "duration"}, _arena_row),
    ({"job_id", "gpu_num", "submit_time", "duration"}, _helios),
)
