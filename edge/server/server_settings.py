"""Settings of the server: who may use it, and its limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

from ...errors import InputError

LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
"""Names by which programs of this machine reach the server."""

MAX_HEADER_BYTES: Final = 64 << 10
"""Largest size of a request's headers."""


@dataclass(frozen=True)
class ServerSettings:
    """Who may use the server, and its limits. Times are in seconds."""

    host: str = "127.0.0.1"
    """Address that the server binds."""
    api_key: str | None = None
    """What clients have to send as `Authorization: Bearer`; None to let every program of this machine in."""
    allow_hosts: tuple[str, ...] = ()
    """Further host names by which clients may address the server."""
    allow_origins: tuple[str, ...] = ()
    """Web origins whose pages may use the server, such as `https://example.com`; `*` for all."""
    allow_image_urls: bool = False
    """Whether images at web addresses are fetched."""
    max_body_bytes: int = 32 << 20
    """Largest body of a request."""
    max_requests: int = 256
    """Largest number of requests that are being answered or wait, and of open connections."""
    body_timeout_s: float = 60.0
    """Time within which a client has to send a body."""
    request_timeout_s: float = 3600.0
    """Time within which an answer has to be finished."""
    header_timeout_s: float = 20.0
    """Time within which a client has to send the headers of a request it has begun, or of its first one."""
    keep_alive_s: float = 30.0
    """Time for which a connection without a request stays open."""
    write_timeout_s: float = 60.0
    """Time after which a client that does not read what was sent is disconnected."""
    silence_s: float = 15.0
    """Time without an event after which a stream gets a comment, so that a connection that is gone is noticed."""

    def __post_init__(self) -> None:
        if self.api_key is not None and (
            not self.api_key or not self.api_key.isascii() or not self.api_key.isprintable()
        ):
            raise InputError("the API key is empty or has characters that a header cannot have", "use printable ASCII")
        if self.api_key is None and not self.is_loopback:
            raise InputError(
                f"{self.host} can be reached from other machines", "set an API key (--api-key-file), or bind 127.0.0.1"
            )
        if self.max_body_bytes < 1 or self.max_requests < 1 or not self.request_timeout_s > 0:
            raise InputError(
                f"the limits are a body of {self.max_body_bytes} bytes, {self.max_requests} requests and "
                f"{self.request_timeout_s} seconds",
                "they must be positive",
            )
        for origin in self.allow_origins:
            if origin != "*" and ("://" not in origin or origin.count("/") > 2):
                raise InputError(
                    f"{origin} is not a web origin", "give a scheme and a host, such as https://example.com, or *"
                )

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine reach the address."""
        address = _address(self.host)
        return self.host == "localhost" or (address is not None and address.is_loopback)

    def allows_host(self, header: str) -> bool:
        """Whether a `Host` header names this server.

        A page that a browser loads from another name whose address was changed to this machine's (DNS rebinding) sends
        that name. An address cannot be changed so, and is accepted where the server is reachable by its address.
        """
        host = host_name(header)
        if host in LOOPBACK_HOSTS or host in {name.lower() for name in self.allow_hosts} or "*" in self.allow_hosts:
            return True
        return host == self.host.lower() or (not self.is_loopback and _address(host) is not None)


def host_name(header: str) -> str:
    """The host of a `Host` header in lower case, without port and brackets; empty if it is malformed."""
    text = header.strip().lower()
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        return name if bracket and (not port or (port[0] == ":" and port[1:].isdecimal())) else ""
    name, colon, port = text.partition(":")
    return name.removesuffix(".") if not colon or port.isdecimal() else ""


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
