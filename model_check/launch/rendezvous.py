"""How the hosts of a job find each other: torch's c10d rendezvous."""

from __future__ import annotations

import os
import uuid
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from model_check.launch.placement import Hosts


def open_rendezvous(hosts: Hosts) -> RendezvousHandler:
    """torch's c10d rendezvous: on a free loopback port for one host, at the common endpoint for several."""
    # Each attempt gets a store of its own: with a shared one a restart finds the keys of the attempt before it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    alone = hosts.count == 1
    extra: dict[str, Any] = {"is_host": True} if alone else {}
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=hosts.endpoint,
        run_id=uuid.uuid4().hex if alone else hosts.job_id,
        min_nodes=hosts.count,
        max_nodes=hosts.count,
        local_addr=hosts.local_addr,
        **extra,
    )
    return get_rendezvous_handler(parameters)
