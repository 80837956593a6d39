"""What each rank of a session over torch.distributed does; also a script for launchers.

As a script: arguments are what to do and the timeout; prints a JSON object per endpoint, its number and its
result or error.
"""

import json
import os
import signal
import sys
import threading
import time
import uuid

import torch

from private_llm.config import PrivateConfig
from private_llm.net.distributed import DistMesh
from private_llm.net.transport import CLIENT

ENDPOINTS = [0, 1, 2, CLIENT]
SHAPES = [
    ((), torch.int64),
    ((0,), torch.int64),
    ((5, 3), torch.int32),
    ((4031,), torch.uint8),
    ((4032,), torch.uint8),
]
SHAPES += [((4033,), torch.uint8), ((1000, 1001), torch.int64)]


def pattern(sender, shape, dtype):
    return (torch.arange(torch.Size(shape).numel()) + sender).to(dtype).view(shape)


def everything_to_everybody(t):
    """All shapes to all others first, then all are received: nothing blocks, nothing is mixed up."""
    for peer in ENDPOINTS:
        for number, (shape, dtype) in enumerate(SHAPES):
            if peer != t.me:
                t.send(peer, f"m{number}", pattern(t.me, shape, dtype))
    for peer in ENDPOINTS:
        for number, (shape, dtype) in enumerate(SHAPES):
            if peer != t.me:
                t.wait(peer)
                assert torch.equal(t.recv(peer, f"m{number}", shape, dtype), pattern(peer, shape, dtype))
    if t.me in (1, 2):
        large = torch.full(((64 << 20) // 8,), t.me)
        assert t.exchange(3 - t.me, "large", large).eq(3 - t.me).all()
    t.close()
    return t.ledger.cost().total


def bytes_to_everybody(t):
    """Frames of lengths that receivers do not know: within the first block, at its end, behind it."""
    sizes = [5, 4032, 4033, 70_000]
    for peer in ENDPOINTS:
        for size in sizes:
            if peer != t.me:
                t.send_bytes(peer, "control", bytes([t.me]) * size)
    for peer in ENDPOINTS:
        for size in sizes:
            if peer != t.me:
                t.wait(peer)
                assert t.recv_bytes(peer, "control", 70_000) == bytes([peer]) * size
    t.close()
    return t.ledger.cost().total


def too_many_bytes(t):
    if t.me == 1:
        t.send_bytes(2, "control", bytes(5000))
        t.recv(2, "next", (1,), torch.int64)
    elif t.me == 2:
        t.recv_bytes(1, "control", 4999)
    else:
        t.recv(1, "next", (1,), torch.int64)


def disagreement(t):
    if t.me == 1:
        t.send(2, "mul", torch.full((3,), 4242424242))
        t.recv(2, "next", (1,), torch.int64)
    elif t.me == 2:
        t.recv(1, "mul", (4,), torch.int64)
    else:
        t.recv(1, "next", (1,), torch.int64)
    return None


def work_for_ever(t):
    while True:
        if t.me in (1, 2):
            t.exchange(3 - t.me, "mul", torch.zeros(10, dtype=torch.int64))
        else:
            t.recv(1, "reveal", (1,), torch.int64)


def one_is_killed(t):
    if t.me == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    work_for_ever(t)


def one_is_silent(t):
    if t.me == 2:
        time.sleep(3600)
    work_for_ever(t)


def one_gives_up(t):
    if t.me == 2:
        t.abort("layer 3 overflowed")
        return None
    return work_for_ever(t)


def main(what, timeout):
    """Run this rank's endpoints; results by endpoint."""
    torch.set_num_threads(1)
    apart = os.environ.get("APART")  # ranks say that each runs on a machine of its own
    if apart:
        uuid.getnode = os.getpid
    mesh = DistMesh(PrivateConfig(timeout_s=timeout, trusted_network=apart == "trusted"))
    results = {}

    def one(me):
        try:
            results[me] = what(mesh.transport(me))
        except Exception as error:
            results[me] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=one, args=(me,)) for me in mesh.endpoints]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if what in (everything_to_everybody, bytes_to_everybody):
        mesh.close()
    return results


def show(results):
    for me, result in results.items():
        sys.stdout.write(json.dumps({"endpoint": me, "result": result}) + "\n")
    sys.stdout.flush()


def main_and_show(what, timeout):
    show(main(what, timeout))


def child(env, what, timeout, pipe):
    """A rank that the test starts itself."""
    os.environ.update(env)
    try:
        pipe.send(main(globals()[what], timeout))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    pipe.recv()  # the store lives in rank 0: nobody leaves before the test says so


if __name__ == "__main__":
    if sys.argv[1] == "debug_launcher":
        from accelerate import debug_launcher

        debug_launcher(main_and_show, (everything_to_everybody, 60.0), num_processes=4)
    else:
        main_and_show(globals()[sys.argv[1]], float(sys.argv[2]))
