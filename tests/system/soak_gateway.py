"""A gateway over several models, as a process that `soak_service.py` starts; it ends when its standard input does."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from private_llm_cli.commands.models import quiet
from private_llm_gateway.app import bound_socket, create_app, server_of
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings
from private_llm_hf import AutoPrivateModel, AutoPrivateModelForCausalLM
from transformers import AutoTokenizer

from private_llm.config import PrivateConfig

_END_S = 60
"""Seconds that the gateway may take to end, once nobody asks any more."""


@contextlib.contextmanager
def gateway(order: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Serve what `order` says (see `serve`); the process and its port. Raises RuntimeError if it does not begin."""
    command = [sys.executable, "-c", "import soak_gateway; soak_gateway.serve()"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    if child.stdin is None or child.stdout is None:
        raise RuntimeError("the gateway has no pipes")
    try:
        child.stdin.write(json.dumps(order) + "\n")
        child.stdin.flush()
        port = child.stdout.readline()
        if not port:
            raise RuntimeError("the gateway did not begin; its own message is above")
        yield child.pid, int(port)
        child.stdin.close()
        if child.wait(_END_S + 30) != 0:
            raise RuntimeError(f"the gateway ended with status {child.returncode}, or not in {_END_S} s (stacks above)")
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def serve() -> None:
    """Read {config, token, limits, models: [[name, folder, writes, sessions]]}, and serve on a free port."""
    order = json.loads(sys.stdin.readline())
    quiet()
    config = PrivateConfig.from_dict(order["config"])
    models: dict[str, Served] = {}
    for name, folder, writes, sessions in order["models"]:
        auto = AutoPrivateModelForCausalLM if writes else AutoPrivateModel
        pool = SessionPool(auto.from_pretrained(folder, config), sessions)
        models[name] = Served(name, pool, AutoTokenizer.from_pretrained(folder))
    listening = bound_socket(GatewaySettings(port=0, token=order["token"]))
    settings = GatewaySettings(port=listening.getsockname()[1], token=order["token"], **order["limits"])
    server = server_of(create_app(models, settings), settings)

    def end() -> None:
        sys.stdin.read()
        faulthandler.dump_traceback_later(_END_S, exit=True)
        server.should_exit = True

    threading.Thread(target=end, daemon=True).start()
    print(settings.port, flush=True)
    server.run(sockets=[listening])
    for served in models.values():
        served.pool.close()
