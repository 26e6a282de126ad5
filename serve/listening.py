"""Where a server listens: a socket for each address of its host."""

import contextlib
import errno
import socket
from collections.abc import Iterator, Mapping

from dsjax.errors import OptionError

NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@contextlib.contextmanager
def bound_sockets(host: str, port: int) -> Iterator[list[socket.socket]]:
    """A socket for each address of `host` that this machine has (127.0.0.1 and ::1), all at one port; 0: any free one.

    They do not listen yet: a taken port shows at once, not after loading a model. Raises OptionError.
    """
    with contextlib.ExitStack() as closed_at_end:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = {address: family for family, _, _, _, address in found}
            bound = _bind_all(addresses, closed_at_end)
        except (OSError, OverflowError, UnicodeError) as error:
            raise cannot_listen(host, port, error) from None
        yield bound


def cannot_listen(host: str, port: int, error: Exception) -> OptionError:
    """What to tell about an address that is taken, or not there."""
    return OptionError(f"Cannot listen at {host}:{port} ({error}). Choose another --host or --port.")


def _bind_all(addresses: Mapping[tuple, int], closed_at_end: contextlib.ExitStack) -> list[socket.socket]:
    bound: list[socket.socket] = []
    absent: OSError | None = None
    for (host, port, *rest), family in addresses.items():
        port = bound[0].getsockname()[1] if bound else port
        try:
            each = closed_at_end.enter_context(socket.socket(family, socket.SOCK_STREAM))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and len(addresses) > 1:  # else it would take IPv4 as well, if the host is ::
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.bind((host, port, *rest))
        except OSError as error:
            if error.errno not in NO_SUCH_ADDRESS:
                raise
            absent = error
        else:
            bound.append(each)
    if absent is not None and not bound:
        raise absent
    return bound
