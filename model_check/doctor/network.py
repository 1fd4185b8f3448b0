"""What ranks need to meet: the environment's numbers, loopback, the host's own name, ports."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from model_check.doctor.check import Check, failed, passed, warned
from model_check.doctor.settings import Settings
from model_check.errors import UsageError
from model_check.record.rank_context import DEFAULT_MASTER_PORT, RankContext, foreign_launcher
from model_check.supervise.processes import port_holder

LOOPBACK = "loopback"
_BYTES = b"model-check"
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FEW_PORTS = 1000


def check_network(settings: Settings) -> Iterator[Check]:
    yield check_environment(settings.environ)
    yield check_loopback(settings.limits.answer_s)
    yield check_host_name(settings.limits.answer_s, settings.environ)
    yield check_port(settings.environ)


def check_environment(environ: Mapping[str, str]) -> Check:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, where another launcher or a person has set them."""
    name = "job environment"
    given = {key: environ[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if key in environ}
    if not given:
        return passed(name, "no RANK, WORLD_SIZE, MASTER_ADDR: the launcher sets them")
    shown = " ".join(f"{key}={value}" for key, value in given.items())
    fix = "unset them, or set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun does"
    if ("RANK" in given) != ("WORLD_SIZE" in given):
        return failed(name, f"{shown}: RANK and WORLD_SIZE go together", fix)
    if foreign_launcher(environ):
        try:
            RankContext.from_environment(environ, run_dir=Path("."))
        except UsageError as error:
            return failed(name, error.message, error.remedy or fix)
    address = given.get("MASTER_ADDR")
    if address is not None and not _resolves(address):
        return failed(name, f"MASTER_ADDR={address} is not a host this machine knows", "use the first host's address")
    return passed(name, shown)


def _resolves(address: str) -> bool:
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError):
        return False
    return True


def check_loopback(limit_s: float) -> Check:
    """A listener and a client on 127.0.0.1: what the ranks of one host use to meet."""
    problem = _exchange("127.0.0.1", limit_s)
    if problem:
        fix = "ip link set lo up, and let 127.0.0.1 through the firewall: the ranks of this host meet there"
        return failed(LOOPBACK, f"127.0.0.1: {problem}", fix)
    return passed(LOOPBACK, "a connection to 127.0.0.1 carries bytes both ways")


def check_host_name(limit_s: float, environ: Mapping[str, str]) -> Check:
    """gloo takes the address behind the host's own name, unless an interface is named."""
    name = "host name"
    interface = environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        known = psutil.net_if_addrs()
        if interface not in known:
            fix = f"set it to one of {', '.join(sorted(known))}, or unset it"
            return failed(name, f"GLOO_SOCKET_IFNAME={interface} is no interface of this machine", fix)
        return passed(name, f"gloo uses the interface {interface} (GLOO_SOCKET_IFNAME)")
    host = socket.gethostname()
    fix = f"add '127.0.1.1 {host}' to /etc/hosts, or export GLOO_SOCKET_IFNAME=lo"
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
    except OSError as error:
        return warned(name, f"{host} has no address here ({error.strerror}): gloo falls back to loopback", fix)
    problem = _exchange(str(address), limit_s)
    if problem:
        return warned(name, f"{host} is {address}, where no connection succeeds: {problem}", fix)
    return passed(name, f"{host} is {address} and answers")


def _exchange(address: str, limit_s: float) -> str:
    """Opens a port there, connects to it, sends a few bytes each way; what went wrong, or nothing."""
    try:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server((address, 0)))
            listener.settimeout(limit_s)
            client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=limit_s))
            server, _ = listener.accept()
            stack.enter_context(server)
            server.settimeout(limit_s)
            client.sendall(_BYTES)
            server.sendall(server.recv(len(_BYTES)))
            echoed = client.recv(len(_BYTES))
    except OSError as error:
        return error.strerror or str(error)
    return "" if echoed == _BYTES else f"sent {_BYTES!r}, got {echoed!r}"


def check_port(environ: Mapping[str, str]) -> Check:
    """MASTER_PORT where it is set, else the one torchrun takes by default; and that there are ports left to choose."""
    name = "ports"
    text = environ.get("MASTER_PORT", str(DEFAULT_MASTER_PORT))
    if not text.isdigit() or not 0 < int(text) < 65536:
        return failed(
            name, f"MASTER_PORT={text} is not a port", "use a number from 1024 to 65535, the same on every host"
        )
    port = int(text)
    fix = f"export MASTER_PORT={_free_port()}, or torchrun --standalone; model-check chooses a free port itself"
    holder = _holder(port)
    if holder is not None:
        if "MASTER_PORT" in environ and environ.get("RANK", "0") == "0":
            return failed(name, f"MASTER_PORT={port} is taken by {holder}", fix)
        return warned(name, f"{port}, torchrun's default, is taken by {holder}", fix)
    low, high = _dynamic_ports()
    if high - low < _FEW_PORTS:
        return warned(name, f"only {high - low + 1} dynamic ports ({low} to {high})", f"widen {_PORT_RANGE}")
    return passed(name, f"{port} is free; dynamic ports {low} to {high}")


def _free_port() -> int:
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return int(probe.getsockname()[1])
    except OSError:
        return DEFAULT_MASTER_PORT + 1


def _holder(port: int) -> str | None:
    """Who listens there; None where the port is free."""
    with socket.socket() as probe:
        # A port whose last connections are still closing can be listened on by a server that says so, as ours do.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            pass
        else:
            return None
    holder = port_holder(port)
    if holder is None or not holder.pid:
        return "another process"
    return f"pid {holder.pid} ({''.join(holder.command[:1])})"


def _dynamic_ports() -> tuple[int, int]:
    try:
        low, high = _PORT_RANGE.read_text().split()
    except OSError:
        return 1024, 65535
    return int(low), int(high)
