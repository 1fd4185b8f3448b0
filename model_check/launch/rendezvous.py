"""How the hosts of a job find each other: torch's c10d rendezvous, with status lines while it waits.

torch tries silently for a minute, ignores Ctrl-C, and then prints a C++ backtrace. So we look at the endpoint first,
and call torch only if it can succeed: the port is free on this host, or a store already answers there.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from model_check.errors import LaunchError, UsageError
from model_check.launch.placement import LOOPBACK, Hosts
from model_check.record.redaction import redact_argv
from model_check.supervise import processes

JOIN_S = 600.0  # torch's own limit for hosts to arrive
_TAKEN_AFTER_S = 4.0  # a store needs time between bind and its first answer
_TAKEN_ELSEWHERE_AFTER_S = 30.0  # a proxy may answer for a host that is still starting
_CONNECT_S = 2.0
_PAUSE_S = 0.25
# The first queries of torch's TCPStore: VALIDATE with its magic number, and PING with a number to echo.
_HELLO = struct.pack("=BIBI", 0, 0x3C85F7CE, 13, 0x4D43)
_ANSWER = struct.pack("=I", 0x4D43)

_FIRST_LINE_S = 2.0
_LINE_EVERY_S = 5.0

Found = Literal["store", "stranger", "nobody"]
_Answer = TypeVar("_Answer", tuple[bytes, Token] | None, tuple[bytes, Token, bool] | None)


def open_rendezvous(hosts: Hosts, say: Callable[[str], None]) -> RendezvousHandler:
    """torch's c10d rendezvous: on a free loopback port for one host, at the common endpoint for several."""
    # Each attempt gets a store of its own: with a shared one a restart finds the keys of the attempt before it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    endpoint = Endpoint.of(hosts)
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


@dataclass(frozen=True)
class Endpoint:
    """Where the hosts meet: who answers there, and whether its port is free."""

    host: str
    port: int
    shown: str

    @classmethod
    def of(cls, hosts: Hosts) -> Endpoint:
        try:
            host, port = parse_rendezvous_endpoint(hosts.endpoint, default_port=DEFAULT_PORT)
        except ValueError:
            raise UsageError(
                f"--rdzv-endpoint {hosts.endpoint} is not a host and a port",
                remedy="write HOST:PORT, e.g. node-0:29400",
            ) from None
        return cls(host, port, hosts.endpoint)

    def wait_until_usable(self, waiting: Callable[[], None]) -> bool:
        """Returns when torch can open the port here (True) or join a store (False). Raises if another program has it.

        `waiting` is called repeatedly while nobody answers.
        """
        started = time.monotonic()
        taken_since: float | None = None
        while True:
            here = self._is_here()
            if here and is_free(self.port):
                return True
            found = self._ask()
            if found == "store":
                return False
            now = time.monotonic()
            taken = here or found == "stranger"
            taken_since = (taken_since or now) if taken else None
            patience = _TAKEN_AFTER_S if here else _TAKEN_ELSEWHERE_AFTER_S
            if taken_since is not None and now - taken_since > patience:
                if not _recognises_store():
                    return False  # this torch uses another protocol, so let it try
                raise self.taken(here=here)
            if now - started > JOIN_S:
                raise LaunchError(
                    f"nothing answered at {self.shown} for {JOIN_S:.0f} s",
                    remedy="start the same command on that host, and check that this host can reach it",
                )
            waiting()
            time.sleep(_PAUSE_S)

    def taken(self, *, here: bool) -> LaunchError:
        """The error for a port that is taken; names the process if we can see it."""
        holder = processes.port_holder(self.port) if here else None
        by = " by another program"
        if holder is not None and holder.pid:
            by = f" by process {holder.pid} ({' '.join(redact_argv(holder.command, os.environ))})"
        return LaunchError(
            f"port {self.port} of {self.shown}, where the hosts of the job meet, is taken{by}",
            remedy="end that process if it is a leftover, or give every host another port in --rdzv-endpoint",
            code="MC103",
        )

    def _addresses(self) -> list[tuple[socket.AddressFamily, str]]:
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError:
            return []  # the name does not resolve yet, as for a pod that is starting
        return [(family, str(address[0])) for family, _, _, _, address in found]

    def _is_here(self) -> bool:
        """Only an address of this host can be bound."""
        for family, address in self._addresses():
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                try:
                    probe.bind((address, 0))
                    return True
                except OSError:
                    continue
        return False

    def _ask(self) -> Found:
        answers = [ask(address, self.port) for _, address in self._addresses()]
        return "store" if "store" in answers else "stranger" if "stranger" in answers else "nobody"


def is_free(port: int) -> bool:
    """Whether torch's store could listen on this port; it binds all addresses at once."""
    family, everywhere = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((everywhere, port))
        except OSError as error:
            if error.errno == errno.EACCES:
                raise LaunchError(
                    f"port {port} may not be opened by this user", remedy="give --rdzv-endpoint a port from 1024 on"
                ) from None
            return False
    return True


def ask(host: str, port: int) -> Found:
    """Whether a store, another program or nobody answers there."""
    try:
        connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    except OSError:
        return "nobody"
    with connection:
        try:
            connection.sendall(_HELLO)
            return "store" if connection.recv(len(_ANSWER), socket.MSG_WAITALL) == _ANSWER else "stranger"
        except OSError:
            return "stranger"


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
