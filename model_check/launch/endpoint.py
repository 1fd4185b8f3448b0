"""The endpoint where the hosts of a job meet: who answers there, and whether its port is free. Imports no torch.

torch tries silently for a minute, ignores Ctrl-C, and then prints a C++ backtrace. So we look first, and call torch
only if it can succeed: the port is free on this host, or a store already answers there.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from model_check.errors import LaunchError
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

Found = Literal["store", "stranger", "nobody"]


@dataclass(frozen=True)
class Endpoint:
    """Where the hosts meet. `recognises_store`: whether `ask` recognises a live store of this version of torch."""

    host: str
    port: int
    shown: str
    recognises_store: Callable[[], bool]

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
                if not self.recognises_store():
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
