"""How the hosts of a job find each other: torch's c10d rendezvous, with status lines while it waits."""

from __future__ import annotations

import os
import pickle
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from model_check.errors import UsageError
from model_check.launch.endpoint import Endpoint, ask, is_free
from model_check.launch.placement import LOOPBACK, Hosts

_FIRST_LINE_S = 2.0
_LINE_EVERY_S = 5.0

_Answer = TypeVar("_Answer", tuple[bytes, Token] | None, tuple[bytes, Token, bool] | None)


def open_rendezvous(hosts: Hosts, say: Callable[[str], None]) -> RendezvousHandler:
    """torch's c10d rendezvous: on a free loopback port for one host, at the common endpoint for several."""
    # Each attempt gets a store of its own: with a shared one a restart finds the keys of the attempt before it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    endpoint = _parse(hosts)
    if hosts.count == 1:
        if endpoint.port and not is_free(endpoint.port):
            raise endpoint.taken(here=True)
        parameters = _parameters(hosts, uuid.uuid4().hex, is_host=True)
        backend, store = create_backend(parameters)
        return create_handler(store, backend, parameters)
    line = _WaitingLine(hosts, say)
    is_host = endpoint.wait_until_usable(line.nobody_answers)
    parameters = _parameters(hosts, hosts.job_id, is_host=is_host)
    try:
        backend, store = create_backend(parameters)
    except RendezvousConnectionError:
        if not is_host:
            raise
        # Another launcher on this host opened the port first.
        backend, store = create_backend(_parameters(hosts, hosts.job_id, is_host=False))
    return create_handler(store, _CountingBackend(backend, line), parameters)


def _parameters(hosts: Hosts, run_id: str, *, is_host: bool) -> RendezvousParameters:
    return RendezvousParameters(
        backend="c10d",
        endpoint=hosts.endpoint,
        run_id=run_id,
        min_nodes=hosts.count,
        max_nodes=hosts.count,
        local_addr=hosts.local_addr,
        is_host=is_host,
    )


def _parse(hosts: Hosts) -> Endpoint:
    try:
        host, port = parse_rendezvous_endpoint(hosts.endpoint, default_port=DEFAULT_PORT)
    except ValueError:
        raise UsageError(
            f"--rdzv-endpoint {hosts.endpoint} is not a host and a port", remedy="write HOST:PORT, e.g. node-0:29400"
        ) from None
    return Endpoint(host, port, hosts.endpoint, _recognises_store)


def _recognises_store() -> bool:
    """Whether a store of this version of torch answers our query."""
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    return ask(LOOPBACK, store.port) == "store"


class _WaitingLine:
    """Prints a line every few seconds while hosts are missing, and none if all arrive at once."""

    def __init__(self, hosts: Hosts, say: Callable[[str], None]) -> None:
        self._hosts = hosts
        self._say = say
        self._next: float | None = None

    def nobody_answers(self) -> None:
        self._wait(f"nothing answers at {self._hosts.endpoint} yet")

    def have_arrived(self, count: int) -> None:
        if count >= self._hosts.count:
            self._next = None
        else:
            self._wait(f"{count} of {self._hosts.count} at {self._hosts.endpoint}; run the same command on each")

    def _wait(self, text: str) -> None:
        now = time.monotonic()
        if self._next is None:
            self._next = now + _FIRST_LINE_S
        elif now >= self._next:
            self._next = now + _LINE_EVERY_S
            self._say(f"waiting for hosts: {text}")


class _CountingBackend(RendezvousBackend):
    """Reads the state that torch exchanges about once a second, and counts the hosts in it."""

    def __init__(self, backend: RendezvousBackend, line: _WaitingLine) -> None:
        self._backend = backend
        self._line = line

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._counted(self._backend.get_state())

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        return self._counted(self._backend.set_state(state, token))

    def _counted(self, answer: _Answer) -> _Answer:
        if answer is not None:
            # Safe: torch itself unpickles these bytes a moment later.
            with suppress(Exception):  # another version's state: the line is only for people
                self._line.have_arrived(len(pickle.loads(answer[0]).participants))
        return answer
