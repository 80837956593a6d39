"""All endpoints of one session in one process: each party's code on a thread of its own, the client's on this one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from private_llm.config import PrivateConfig
from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.session import Session, join, join_as_client

Result = TypeVar("Result")


def run_session(
    config: PrivateConfig,
    at_party: Callable[[Session, Transport], None],
    at_client: Callable[[ClientEnd], Result],
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
    timeout: float = 30.0,
) -> Result:
    """Join all endpoints, run both functions, return the client's result; the first error of any endpoint is raised.

    `wrap` may put something around every party's transport (a recorder, a fault).
    """
    mesh = LocalMesh(config.parties, timeout=timeout)
    failures: list[BaseException] = []

    def party(number: int) -> None:
        try:
            transport = wrap(mesh.transport(number))
            at_party(join(config, number, transport), transport)
        except BaseException as error:
            failures.append(error)
            mesh.abort(f"party {number}: {error}")

    threads = [threading.Thread(target=party, args=(number,), daemon=True) for number in range(config.parties)]
    for thread in threads:
        thread.start()
    try:
        result = at_client(join_as_client(config, mesh.transport(CLIENT)))
    except Exception as error:
        failures.append(error)
        mesh.abort(f"the client: {error}")
    for thread in threads:
        thread.join(2 * timeout)
    if failures:
        raise failures[0]
    return result
