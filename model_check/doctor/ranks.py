"""Stage ranks: what ranks need to meet, then ranks that meet and add up numbers, through the real launcher."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

from model_check.doctor.check import Check, failed, passed, skipped
from model_check.doctor.jobs import finished_job
from model_check.doctor.network import LOOPBACK, check_network
from model_check.doctor.probe import PROGRAMS, side_by_side
from model_check.doctor.settings import Settings


def check_ranks(settings: Settings) -> Iterator[Check]:
    network = list(check_network(settings))
    yield from network
    if any(check.name == LOOPBACK and check.status == "fail" for check in network):
        yield skipped("gloo ranks", "ranks cannot meet without loopback")
        return
    jobs = [partial(check_start, settings, "cuda", len(settings.gpus))] if settings.gpus else []
    jobs.append(partial(check_start, settings, "cpu", settings.cpu_ranks))
    yield from side_by_side(jobs, settings.cores // 4)


def check_start(settings: Settings, kind: str, ranks: int) -> Check:
    """Every rank must come, and every rank must hold the right sum."""
    backend = "NCCL" if kind == "cuda" else "gloo"
    what = f"{ranks} {'GPU' if kind == 'cuda' else 'CPU'} rank{'s' if ranks != 1 else ''}"
    name = f"{backend} ranks"
    arguments = ["--nproc", str(ranks), str(PROGRAMS / "rank_sums.py"), ".", kind]
    with finished_job(settings.run, arguments, settings) as job:
        if job.problem:
            return failed(name, f"{what}: {job.problem}", _remedy(kind))
        answers = [json.loads(file.read_text()) for file in sorted(job.folder.glob("rank-*.json"))]
        return judge_sums(name, what, answers, ranks, job.answer.seconds)


def judge_sums(name: str, what: str, answers: list[dict[str, object]], ranks: int, seconds: float) -> Check:
    wrong = [str(answer["rank"]) for answer in answers if not answer["right"]]
    if wrong:
        return failed(name, f"the all-reduce is wrong on rank {', '.join(wrong)}", "do not train here: silent errors")
    if len(answers) != ranks:
        return failed(name, f"{len(answers)} of {ranks} ranks reported", "run it again with model-check run")
    return passed(name, f"{what} started, all-reduce right, {seconds:.1f} s from the command to the end")


def _remedy(kind: str) -> str:
    if kind == "cuda":
        return (
            "NCCL_DEBUG=INFO model-check doctor --only ranks; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 to narrow it down"
        )
    return "export GLOO_SOCKET_IFNAME=lo, and look at loopback and host name above"
