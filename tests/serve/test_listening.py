"""Sockets for the addresses of a host."""

import socket
from typing import Any

import pytest

from dsjax.errors import OptionError
from dsjax.serve.listening import bound_sockets

V4, V6, ABSENT = ("127.0.0.1", 0), ("::1", 0, 0, 0), ("192.0.2.1", 0)


def pretend(monkeypatch: pytest.MonkeyPatch, *addresses: tuple) -> None:
    """Let every name stand for `addresses`, with the port that is asked for."""

    def resolve(_: str, port: int, **__: Any) -> list[tuple]:
        families = (socket.AF_INET6 if ":" in address[0] else socket.AF_INET for address in addresses)
        return [(f, socket.SOCK_STREAM, 6, "", (a[0], port, *a[2:])) for f, a in zip(families, addresses, strict=True)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_all_addresses_of_a_host_at_one_port(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, V4, V4, ABSENT, V6)
    with bound_sockets("localhost", 0) as bound:
        names = [each.getsockname() for each in bound]
        assert [name[0] for name in names] == ["127.0.0.1", "::1"]
        assert len({name[1] for name in names}) == 1
        for each in bound:
            each.listen()
        for each, name in zip(bound, names, strict=True):
            with socket.socket(each.family) as client:
                client.connect(name)
    assert all(each.fileno() == -1 for each in bound)


def test_both_wildcards_do_not_take_each_others_port(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, ("0.0.0.0", 0), ("::", 0, 0, 0))
    with bound_sockets("everywhere", 0) as bound:
        for each in bound:
            each.listen()
        assert len(bound) == 2


def test_an_address_that_is_taken_or_absent_everywhere(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        pretend(monkeypatch, V4, V6)
        with pytest.raises(OptionError, match=f"localhost:{port} .*in use"), bound_sockets("localhost", port):
            pass
    pretend(monkeypatch, ABSENT, ("2001:db8::1", 0, 0, 0))
    with pytest.raises(OptionError, match=r"Cannot listen at elsewhere:0 .*assign"), bound_sockets("elsewhere", 0):
        pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "x" * 300, ""])
def test_a_host_without_address(host: str):
    with pytest.raises(OptionError, match=f"Cannot listen at {host}:80 "), bound_sockets(host, 80):
        pass
