"""Stage hub: does the hub answer, does it know the token, and do its clock and ours agree. Each within two seconds."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from model_check.config.endpoint import reachable
from model_check.doctor.check import Check, failed, foreign_words, passed, skipped, warned
from model_check.doctor.probe import ask
from model_check.doctor.settings import Limits, Settings
from model_check.record.redaction import redact_text

_MAKE = "make one that may read at huggingface.co/settings/tokens, then export HF_TOKEN=…"
_LOCAL = "data.dataset=synthetic or local files, data.tokenizer=builtin and model.init=random need no hub"


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
    words = (endpoint, str(limits.answer_s))
    answer = ask("ask_hub", *words, limit_s=limits.import_limit_s, environ=settings.environ)
    found = answer.value
    if answer.problem == "ended by SIGALRM":
        yield warned("hub", f"{shown} accepts connections and sends nothing within {limits.answer_s:g} s", _LOCAL)
    elif trouble := answer.problem or found.get("trouble"):
        fix = f"HTTPS_PROXY, HF_ENDPOINT or SSL_CERT_FILE may name the wrong thing; {_LOCAL}"
        said = redact_text(foreign_words(trouble))
        yield warned("hub", f"{shown} accepts connections, but a request fails: {said}", fix)
    elif found["token"] == "unusable":
        yield passed("hub", f"{shown} accepts connections")
        yield failed(
            "hub token", "HF_TOKEN holds blanks or signs that no token has: copied with something else?", _MAKE
        )
    elif not found["is_hub"]:
        fix = f"open it in a browser: a proxy or the network's login page may stand in front of it; {_LOCAL}"
        yield warned("hub", f"{shown} answers, but not as the hub does (HTTP {found['status']})", fix)
    else:
        yield passed("hub", f"{shown} answers")
        yield judge_token(found["status"], found["user"], given=found["token"] == "given")
        if found["ahead_s"] is not None:
            yield judge_skew(found["ahead_s"], limits)


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def judge_token(status: int, user: str | None, *, given: bool) -> Check:
    name = "hub token"
    if not given:
        return warned(name, "no HF_TOKEN: gated models and datasets cannot be fetched", _MAKE)
    if status == 200:
        owner = foreign_words(user) if isinstance(user, str) else ""
        return passed(name, f"HF_TOKEN belongs to {owner}" if owner else "HF_TOKEN is accepted")
    if status in (401, 403):
        return failed(name, f"the hub refuses HF_TOKEN (HTTP {status}): expired, revoked or mistyped", _MAKE)
    return warned(name, f"the hub answered HTTP {status} to the question whose it is", "try again later")


def judge_skew(skew: float, limits: Limits) -> Check:
    name = "clock beside the hub"
    fix = "set it: timedatectl set-ntp true, or ntpdate; a container takes its host's clock"
    detail = f"{abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} the hub's"
    if abs(skew) > limits.clock_skew_fail_s:
        return failed(name, f"{detail}: certificates and tokens are refused", fix)
    if abs(skew) > limits.clock_skew_warn_s:
        return warned(name, detail, fix)
    return passed(name, "they agree within seconds")
