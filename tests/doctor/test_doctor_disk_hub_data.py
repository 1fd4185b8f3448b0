"""Disks that are full or refuse locks, hubs that refuse tokens, caches that are damaged: each is found and named."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from model_check.data import DataSpec, prepare
from model_check.doctor import Check, Limits, Places, Settings, examine
from model_check.doctor.data import check_building, check_caches
from model_check.doctor.disk import check_locks, check_maps, check_room, check_write_speed
from model_check.doctor.hub import check_hub
from model_check.doctor.remedies import host_remedy
from tests.doctor.conftest import TOKEN, Hub, confined, confined_stages


def of_hub(hub: Hub, **environ: str) -> dict[str, Check]:
    address = f"http://127.0.0.1:{hub.server_address[1]}"
    # What answers is what is asked about here, not how soon a busy machine lets it.
    limits = replace(Limits(), answer_s=30.0)
    settings = Settings(limits=limits, environ={"HOME": "/nowhere", "HF_ENDPOINT": address, **environ})
    return {check.name: check for check in check_hub(settings)}


@pytest.mark.parametrize(("size", "status"), [("8m", "fail"), ("2g", "warn")])
def test_a_disk_without_room(tmp_path: Path, size: str, status: str) -> None:
    check = confined("room", str(tmp_path), size, unshare="-m")
    assert check.status == status and str(tmp_path) in check.detail and "elsewhere" in check.fix


def test_a_disk_that_fills_up_while_it_is_measured(tmp_path: Path) -> None:
    check = confined("write-speed", str(tmp_path), "8m", unshare="-m")
    assert check.status == "fail" and "No space left on device" in check.detail


def test_everything_is_said_where_no_disk_has_room(tmp_path: Path) -> None:
    """No temporary folder, no map that could be written to: every stage still answers, and blames the disk."""
    checks = {check.name: check for check in confined_stages("disk,data,train", str(tmp_path), "64k", unshare="-m")}
    assert {name for name, check in checks.items() if check.status == "fail"} == {
        "checkpoint folder",
        "write speed",
        "data cache folder",
        "black box",
        "log folder",
        "data",
        "train",
    }
    for name in ("write speed", "black box", "data", "train"):
        assert checks[name].fix.startswith("free space on that disk"), checks[name]
    assert "No usable temporary directory" in checks["train"].detail


def test_a_disk_that_is_read_only_or_limited() -> None:
    assert host_remedy("[Errno 30] Read-only file system", "x") == "use a folder on a disk that may be written to"
    assert host_remedy("[Errno 27] File too large", "x").startswith("ulimit -f unlimited")
    assert host_remedy("[Errno 13] Permission denied", "change its owner") == "change its owner"


def test_a_slow_disk(tmp_path: Path) -> None:
    limits = Limits()
    assert check_write_speed(tmp_path, replace(limits, write_warn_mb_s=0.0)).status == "ok"
    slow = check_write_speed(tmp_path, replace(limits, write_warn_mb_s=1e9))
    assert slow.status == "warn" and "MB/s" in slow.detail and "checkpoint.dir" in slow.fix


def test_a_folder_that_is_a_file_or_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file" in check_room("x", tmp_path / "file" / "below", Limits(), "move").detail
    refused = check_room("x", Path("/proc/checkpoints"), Limits(), "move")
    assert refused.status == "fail" and "cannot be written to" in refused.detail


def test_the_doctor_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    settings = Settings(places=Places(checkpoints=folder, cache=folder, outputs=folder))
    checks = {check.name: check for check in examine("disk", settings)}
    assert set(checks) == {
        "checkpoint folder",
        "write speed",
        "data cache folder",
        "file locks",
        "black box",
        "log folder",
    }
    assert f"to be made in {tmp_path}" in checks["checkpoint folder"].detail
    assert list(tmp_path.iterdir()) == []


def test_locks_work_and_are_refused(tmp_path: Path) -> None:
    assert check_locks(tmp_path, Settings()).status == "ok"
    refused = confined("locks", str(tmp_path))
    assert refused.status == "fail" and "No locks available" in refused.detail and "data.cache_dir" in refused.fix


def test_no_memory_map_where_there_is_no_file() -> None:
    check = check_maps(Path("/proc/nothing"))
    assert check.status == "fail" and "--run-dir" in check.fix


def test_a_token_that_the_hub_knows(hub: Hub) -> None:
    checks = of_hub(hub, HF_TOKEN=TOKEN)
    assert [check.status for check in checks.values()] == ["ok", "ok", "ok"], checks
    assert checks["hub token"].detail == "HF_TOKEN belongs to ada"


@pytest.mark.parametrize(("environ", "status"), [({"HF_TOKEN": "hf_wrong_secret"}, "fail"), ({}, "warn")])
def test_a_token_that_is_wrong_or_missing(hub: Hub, environ: dict[str, str], status: str) -> None:
    check = of_hub(hub, **environ)["hub token"]
    assert check.status == status and "export HF_TOKEN" in check.fix
    assert "hf_wrong_secret" not in check.detail + check.fix


def test_a_token_with_a_blank_inside(hub: Hub) -> None:
    check = of_hub(hub, HF_TOKEN=f"{TOKEN[:9]} {TOKEN[9:]}")["hub token"]
    assert check.status == "fail" and "holds blanks" in check.detail and TOKEN[9:] not in check.detail
    assert of_hub(hub, HF_TOKEN=f"{TOKEN[:9]}\n{TOKEN[9:]}")["hub token"].status == "ok", "the client takes it out"


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_TOKEN_PATH"])
def test_the_token_of_the_login_file(hub: Hub, tmp_path: Path, variable: str) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    place = tmp_path / "token" if variable == "HF_TOKEN_PATH" else tmp_path
    assert of_hub(hub, **{variable: str(place)})["hub token"].detail == "HF_TOKEN belongs to ada"


@pytest.mark.parametrize(("skew", "status"), [(5.0, "ok"), (90.0, "warn"), (-3600.0, "fail"), (3600.0, "fail")])
def test_a_clock_that_differs_from_the_hubs(hub: Hub, skew: float, status: str) -> None:
    hub.skew_s = skew
    check = of_hub(hub)["clock beside the hub"]
    assert check.status == status
    if status == "fail":
        assert ("ahead of" if skew > 0 else "behind") in check.detail


def test_an_unreachable_hub_is_a_warning_within_two_seconds() -> None:
    started = time.monotonic()
    settings = Settings(environ={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": TOKEN})
    hub, token = check_hub(settings)
    assert (hub.status, token.status) == ("warn", "skip")
    assert "data.dataset=synthetic" in hub.fix
    assert time.monotonic() - started < 10


def test_a_hub_that_accepts_and_says_nothing(hub: Hub) -> None:
    hub.silent = True
    address = f"http://127.0.0.1:{hub.server_address[1]}"
    settings = Settings(environ={"HF_ENDPOINT": address}, limits=Limits(answer_s=0.3))
    checks = {check.name: check for check in check_hub(settings)}
    assert checks["hub"].status == "warn" and "sends nothing within 0.3 s" in checks["hub"].detail


@pytest.mark.parametrize(
    "says",
    [(200, b"<html>accept the terms of this network</html>"), (200, b"[]"), (200, b""), (302, b"")],
    ids=["login page", "a list", "nothing", "another host"],
)
def test_somebody_else_in_the_place_of_the_hub(hub: Hub, says: tuple[int, bytes]) -> None:
    hub.says = says
    checks = of_hub(hub, HF_TOKEN=TOKEN)
    assert list(checks) == ["hub"], "nothing is known about the token"
    assert hub.told_elsewhere is None, "the token stays with the host it is meant for"
    assert checks["hub"].status == "warn"
    assert checks["hub"].detail.endswith(f" answers, but not as the hub does (HTTP {says[0]})")


def test_something_that_speaks_no_http() -> None:
    def greet() -> None:
        for _ in range(2):  # the look at the port, then the request
            peer, _ = server.accept()
            with peer:
                if peer.recv(4096):
                    peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        greeter = threading.Thread(target=greet, daemon=True)
        greeter.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        limits = replace(Limits(), answer_s=30.0)
        [check] = check_hub(Settings(limits=limits, environ={"HF_ENDPOINT": address}))
        greeter.join()
    assert check.status == "warn" and check.detail.startswith(f"{address} accepts connections, but a request fails: ")


def test_a_name_cannot_steer_the_terminal(hub: Hub) -> None:
    hub.says = (200, b'{"name": "eve\\u001b[2J\\n"}')
    assert of_hub(hub, HF_TOKEN=TOKEN)["hub token"].detail == "HF_TOKEN belongs to eve?[2J"


@pytest.mark.parametrize("endpoint", ["not a url", "http://127.0.0.1:99999", "huggingface.co", "http://", ""])
def test_an_endpoint_that_is_no_address(endpoint: str) -> None:
    checks = list(check_hub(Settings(environ={"HF_ENDPOINT": endpoint})))
    assert [check.status for check in checks] == ["warn", "skip"]
    assert checks[0].detail == f"HF_ENDPOINT={endpoint.rstrip('/')} is no address"


def test_a_password_in_the_endpoint_is_not_shown() -> None:
    for endpoint in ("http://me:pass-word@127.0.0.1:9", "http://me:pass-word@127.0.0.1:99999"):
        hub, _ = check_hub(Settings(environ={"HF_ENDPOINT": endpoint}))
        assert hub.status == "warn" and "127.0.0.1:9" in hub.detail and "pass-word" not in hub.detail


def test_an_offline_setting_is_respected() -> None:
    [only] = check_hub(Settings(environ={"HF_HUB_OFFLINE": "1"}))
    assert only.status == "skip" and "HF_HUB_OFFLINE" in only.detail


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    assert check_building().status == "ok"
    assert "nothing prepared" in check_caches(tmp_path, 1 << 30).detail
    cache = prepare(DataSpec(samples=50, context_length=64, cache_dir=tmp_path), workers=1).train
    assert check_caches(tmp_path, 1 << 30).detail.endswith("every block read and right")
    assert "prepare --verify" in check_caches(tmp_path, 10).detail
    tokens = cache.folder / "tokens.bin"
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)
    damaged = check_caches(tmp_path, 1 << 30)
    assert damaged.status == "fail" and "[MC901]" in damaged.detail and "block 0 of tokens.bin" in damaged.detail
    assert f"rm -r {cache.folder.parent}" in damaged.fix
