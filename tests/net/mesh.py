"""Endpoints for tests: as threads over real connections, or as real processes."""

import multiprocessing
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from private_llm.config import PrivateConfig
from private_llm.net.addresses import hosts_of, open_listeners
from private_llm.net.rendezvous import connect
from private_llm.net.sockets import SocketPair, SocketTransport
from private_llm.net.transport import CLIENT

TOKEN = b"a token of one test session"
ENDPOINTS = [0, 1, 2, CLIENT]


SESSION = b"sessionx"


def couple(timeout=10.0, room=1 << 20):
    """Two endpoints on socket pairs, without a handshake.

    room: bytes that the operating system keeps of what endpoint 0 has sent.
    """
    there, back = socket.socketpair(), socket.socketpair()
    for each in (*there, *back):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room if each is there[0] else 1 << 20)
    zero = SocketTransport(0, {1: SocketPair(there[0], SESSION, back[1], SESSION)}, timeout)
    one = SocketTransport(1, {0: SocketPair(back[0], SESSION, there[1], SESSION)}, timeout)
    return zero, one


def raw_peer(timeout=10.0):
    """Endpoint 0, and the bare sockets on which a test writes and reads as party 1 would."""
    there, back = socket.socketpair(), socket.socketpair()
    return SocketTransport(0, {1: SocketPair(there[0], SESSION, back[1], SESSION)}, timeout), back[0], there[1]


def open_mesh(timeout=20.0, tls=None, protocol="trio"):
    """SocketTransports of all parties of a protocol and the client, by endpoint, all in this process."""
    parties = PrivateConfig(protocol=protocol).parties
    listeners, endpoints = open_listeners(parties), [*range(parties), CLIENT]
    hosts = hosts_of(listeners)

    def one(me):
        config = PrivateConfig(protocol=protocol, timeout_s=timeout, tls=tls and tls[me])
        listener = None if me == CLIENT else listeners[me]
        return connect(config, me, hosts=hosts, token=TOKEN, listener=listener)

    with ThreadPoolExecutor(len(endpoints)) as pool:
        return dict(zip(endpoints, pool.map(one, endpoints), strict=True))


def run_threads(transports, work, join_s=60):
    """Run work[endpoint](transport) for each endpoint given; returns results or exceptions by endpoint."""
    results = {}

    def one(me):
        try:
            results[me] = work[me](transports[me])
        except Exception as error:
            results[me] = error

    threads = [threading.Thread(target=one, args=(me,), daemon=True) for me in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(join_s)
        assert not thread.is_alive(), "an endpoint hangs"
    return results


def _child(me, hosts, listener, config, work, pipe):
    try:
        transport = connect(config, me, hosts=hosts, token=TOKEN, listener=listener)
        pipe.send(("connected", None))
        result = work(transport)
    except Exception as error:
        result = (type(error).__name__, str(error))
    pipe.send(("result", result))
    pipe.recv()  # stay alive until the test has seen everything


def process_context():
    """Child processes that start quickly: they fork from a process that has imported the package."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "private_llm.net.rendezvous", "private_llm.net.distributed"])
    return context


class Processes:
    """Three parties and the client as real processes; `work[endpoint]` is a module-level function."""

    def __init__(self, work, timeout=20.0):
        context = process_context()
        listeners = open_listeners(3)
        hosts = hosts_of(listeners)
        config = PrivateConfig(timeout_s=timeout)
        self.pipes, self.processes = {}, {}
        for me in ENDPOINTS:
            self.pipes[me], far = context.Pipe()
            listener = None if me == CLIENT else listeners[me]
            args = (me, hosts, listener, config, work[me], far)
            self.processes[me] = context.Process(target=_child, args=args, daemon=True)
            self.processes[me].start()
            far.close()
        for listener in listeners:
            listener.close()

    def __enter__(self):
        for me in ENDPOINTS:
            assert self.get(me, 60)[0] == "connected"
        return self

    def get(self, me, seconds):
        assert self.pipes[me].poll(seconds), f"endpoint {me} said nothing for {seconds} s"
        return self.pipes[me].recv()

    def result(self, me, seconds=30):
        return self.get(me, seconds)[1]

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.join()
