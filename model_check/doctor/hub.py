"""Stage hub: does the hub answer, does it know the token, and do its clock and ours agree. Each within two seconds."""

from __future__ import annotations

import email.utils
import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from model_check.config.endpoint import reachable
from model_check.doctor.check import Check, failed, foreign_words, passed, skipped, warned
from model_check.doctor.settings import Limits, Settings
from model_check.record.redaction import redact_text

_WHO = "/api/whoami-v2"
_TOKEN = re.compile(r"[!-~]+")  # what may stand in a header
_MAKE = "make one that may read at huggingface.co/settings/tokens, then export HF_TOKEN=…"
_LOCAL = "data.dataset=synthetic or local files, data.tokenizer=builtin and model.init=random need no hub"


@dataclass(frozen=True)
class Reply:
    """What came back: a status (None: nothing came), the server's time, and who the token belongs to.

    `understood` is false where the answer is none that a hub gives: the login page of a network, say. `trouble`: why a
    request came to nothing at once, in the words of Python.
    """

    status: int | None
    at: float | None = None
    user: str | None = None
    understood: bool = True
    trouble: str = ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token stays with the host it is meant for, so what another host says tells nothing about it."""

    def redirect_request(self, *about: object) -> None:
        return None


def check_hub(settings: Settings) -> Iterator[Check]:
    endpoint = settings.environ.get("HF_ENDPOINT", settings.places.hub).rstrip("/")
    limits = settings.limits
    if settings.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        yield skipped("hub", f"HF_HUB_OFFLINE is set; {_LOCAL}")
        return
    shown = redact_text(endpoint)
    if not _is_address(endpoint):
        yield warned("hub", f"HF_ENDPOINT={shown} is no address", f"unset it, or write https://HOST; {_LOCAL}")
        yield skipped("hub token", "only the hub knows whether it is valid")
        return
    if not reachable(endpoint, limits.answer_s):
        fix = f"connect this machine (HTTPS_PROXY, HF_ENDPOINT); {_LOCAL}"
        yield warned("hub", f"{shown} does not answer within {limits.answer_s:g} s", fix)
        yield skipped("hub token", "only the hub knows whether it is valid")
        return
    token = find_token(settings.environ)
    if token is not None and not _TOKEN.fullmatch(token):
        yield passed("hub", f"{shown} accepts connections")
        yield failed("hub token", "HF_TOKEN holds blanks or signs that no token has: copied with a line break?", _MAKE)
        return
    reply = _ask_who(endpoint, token, limits.answer_s)
    if reply.trouble:
        fix = f"HTTPS_PROXY, HF_ENDPOINT or SSL_CERT_FILE may name the wrong thing; {_LOCAL}"
        yield warned("hub", f"{shown} accepts connections, but a request fails: {reply.trouble}", fix)
        return
    if reply.status is None:
        yield warned("hub", f"{shown} accepts connections and sends nothing within {limits.answer_s:g} s", _LOCAL)
        return
    if not reply.understood:
        fix = f"open it in a browser: a proxy or the network's login page may stand in front of it; {_LOCAL}"
        yield warned("hub", f"{shown} answers, but not as the hub does (HTTP {reply.status})", fix)
        return
    yield passed("hub", f"{shown} answers")
    yield judge_token(reply, token is not None)
    if reply.at is not None:
        yield judge_skew(time.time() - reply.at, limits)


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def find_token(environ: Mapping[str, str]) -> str | None:
    """Where the hub's own library looks: two variables, then the file that `hf auth login` writes."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if environ.get(name, "").strip():
            return environ[name].strip()
    caches = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")) / ".cache")
    home = Path(environ.get("HF_HOME") or caches / "huggingface")
    try:
        return Path(environ.get("HF_TOKEN_PATH") or home / "token").expanduser().read_text().strip() or None
    except (OSError, UnicodeError):
        return None


def _ask_who(endpoint: str, token: str | None, limit_s: float) -> Reply:
    """On a thread that nobody waits for: a server that trickles bytes would outlast any socket timeout."""
    replies: list[Reply] = []

    def request() -> None:
        replies.append(_request(endpoint, token, limit_s))

    attempt = threading.Thread(target=request, daemon=True, name="hub-token")
    attempt.start()
    attempt.join(limit_s)
    return replies[0] if replies else Reply(None)


def _request(endpoint: str, token: str | None, limit_s: float) -> Reply:
    try:
        request = urllib.request.Request(endpoint + _WHO)
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=limit_s) as response:
            status, at = response.status, _date(response.headers.get("Date"))
            body = response.read(1 << 20)
    except urllib.error.HTTPError as error:
        redirected = 300 <= error.code < 400
        return Reply(error.code, _date(error.headers.get("Date")), understood=not redirected)
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            return Reply(None)
        return Reply(None, trouble=redact_text(foreign_words(f"{type(reason).__name__}: {reason}")))
    except ValueError:
        return Reply(None)
    try:
        user = json.loads(body).get("name")
    except (ValueError, AttributeError):
        return Reply(status, at, understood=False)
    return Reply(status, at, foreign_words(user) if isinstance(user, str) else None)


def _date(header: str | None) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(header or "").timestamp()
    except (TypeError, ValueError):
        return None


def judge_token(reply: Reply, given: bool) -> Check:
    name = "hub token"
    if not given:
        return warned(name, "no HF_TOKEN: gated models and datasets cannot be fetched", _MAKE)
    if reply.status == 200:
        return passed(name, f"HF_TOKEN belongs to {reply.user}" if reply.user else "HF_TOKEN is accepted")
    if reply.status in (401, 403):
        return failed(name, f"the hub refuses HF_TOKEN (HTTP {reply.status}): expired, revoked or mistyped", _MAKE)
    return warned(name, f"the hub answered HTTP {reply.status} to the question whose it is", "try again later")


def judge_skew(skew: float, limits: Limits) -> Check:
    name = "clock beside the hub"
    fix = "set it: timedatectl set-ntp true, or ntpdate; a container takes its host's clock"
    detail = f"{abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} the hub's"
    if abs(skew) > limits.clock_skew_fail_s:
        return failed(name, f"{detail}: certificates and tokens are refused", fix)
    if abs(skew) > limits.clock_skew_warn_s:
        return warned(name, detail, fix)
    return passed(name, "they agree within seconds")
