"""Asks the hub who we are, with its own client: with the token it finds, and through the proxies it uses.

    python ask_hub.py https://huggingface.co 2.0

The answer must come in that many seconds after the client is loaded: SIGALRM ends this process where it does not, be it
that a server stays silent, sends a byte now and then, or has a name that no name server knows.
"""

from __future__ import annotations

import email.utils
import json
import re
import signal
import sys
import time
from typing import Any

_IN_A_HEADER = re.compile(r"[!-~]+")  # what may stand there


def whoami(endpoint: str, limit_s: float) -> dict[str, Any]:
    from huggingface_hub import get_token
    from huggingface_hub.utils import get_session

    token = get_token()
    if token and not _IN_A_HEADER.fullmatch(token):
        return {"token": "unusable"}
    # The client's own headers name the program that runs it, for which it may ask the hub first.
    session, headers = get_session(), {"authorization": f"Bearer {token}"} if token else {}
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        response = session.get(f"{endpoint}/api/whoami-v2", headers=headers)
    except Exception as error:  # each library that the client is built on has its own
        return {"trouble": f"{type(error).__name__}: {error}"}
    return {"token": "given" if token else "none", **described(response)}


def described(response: Any) -> dict[str, Any]:
    """Status, user and clock. The login page of a network is no hub, and what another host says tells nothing."""
    try:
        ahead_s = time.time() - email.utils.parsedate_to_datetime(response.headers.get("Date", "")).timestamp()
    except ValueError:
        ahead_s = None
    try:
        body = response.json()
    except ValueError:
        body = None
    first = (response.history or [response])[0]
    is_hub = not response.history and (first.status_code >= 400 or isinstance(body, dict))
    user = body.get("name") if isinstance(body, dict) else None
    return {"status": first.status_code, "is_hub": is_hub, "user": user, "ahead_s": ahead_s}


if __name__ == "__main__":
    print(json.dumps(whoami(sys.argv[1], float(sys.argv[2]))))
