"""Whether a hub answers: known within seconds.

Left alone, the libraries retry an unreachable hub for 23 s, and one that accepts connections and stays silent for
minutes. Here one TCP connection, given a second, and one request, given ten, decide.
"""

from __future__ import annotations

import functools
import http.client
import socket
import threading
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

PROBE_SECONDS = 1.0
ANSWER_SECONDS = 10.0


def answers(endpoint: str) -> bool:
    return reachable(endpoint) and not silent(endpoint, ANSWER_SECONDS)


def reachable(endpoint: str, seconds: float = PROBE_SECONDS) -> bool:
    """Whether something accepts connections there, or at the proxy that leads there."""
    target = urlsplit(endpoint)
    host = target.hostname or ""
    proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(target.scheme)
    if proxy:
        target = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    try:
        address = (target.hostname or "", target.port or (80 if target.scheme == "http" else 443))
    except ValueError:
        return False  # a port that is none

    def connects() -> bool:
        try:
            socket.create_connection(address, timeout=seconds).close()
        except OSError:
            return False
        return True

    return _succeeds_within(seconds, connects)


@functools.cache
def silent(endpoint: str, seconds: float) -> bool:
    """Whether a request to what accepts connections there stays without any answer; asked once a process.

    A refusal is an answer, and so is a certificate that only the libraries know how to trust.
    """

    def is_answered() -> bool:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=seconds).close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            # What is no timeout is not what we asked for, but not silence.
            return not isinstance(getattr(error, "reason", error), TimeoutError)
        return True

    return not _succeeds_within(seconds, is_answered)


def _succeeds_within(seconds: float, attempt: Callable[[], bool]) -> bool:
    """On a thread: a name server that stays silent, or a server that trickles bytes, outlasts every socket timeout."""
    succeeded = threading.Event()

    def run() -> None:
        if attempt():
            succeeded.set()

    thread = threading.Thread(target=run, daemon=True, name="hub-probe")
    thread.start()
    thread.join(seconds)
    return succeeded.is_set()
