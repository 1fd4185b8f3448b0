"""Whether a hub answers: known within seconds.

Left alone, the libraries retry an unreachable hub for 23 s, and one that accepts connections and stays silent for
minutes. Here one TCP connection, given a second, and one request, given ten, decide.
"""

from __future__ import annotations

import functools
import http.client
import socket
import threading
import urllib.error
import urllib.request
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
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=seconds).close()
        except OSError:
            return
        connected.set()

    # A thread, because a name server that does not answer holds getaddrinfo far longer than any socket timeout.
    attempt = threading.Thread(target=connect, daemon=True, name="hub-probe")
    attempt.start()
    attempt.join(seconds)
    return connected.is_set()


@functools.cache
def silent(endpoint: str, seconds: float) -> bool:
    """Whether a request to what accepts connections there stays without any answer; asked once a process.

    A refusal is an answer, and so is a certificate that only the libraries know how to trust.
    """
    answered = threading.Event()

    def request() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=seconds).close()
        except TimeoutError:
            return
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                return
        except (OSError, ValueError, http.client.HTTPException):
            pass  # not what we asked for, but not silence
        answered.set()

    # A thread for the same reason as above, and because a server that trickles bytes outlasts every socket timeout.
    attempt = threading.Thread(target=request, daemon=True, name="hub-request")
    attempt.start()
    attempt.join(seconds)
    return not answered.is_set()
