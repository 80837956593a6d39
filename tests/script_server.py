"""Runs scripts as forks of one process, which has imported what most of them import: that takes five seconds each time.

It reads one order a line, a JSON list of script, options, folder, and the files for its output and its errors, and
answers with the exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

import private_llm_cli.app  # noqa: F401 - imported before the first fork
import private_llm_hf  # noqa: F401

WRITE = os.O_WRONLY | os.O_TRUNC


def run(script: str, options: list[str], folder: str, out: str, err: str) -> None:
    """As `python script options` in a folder."""
    for number, (name, flags) in enumerate(((os.devnull, os.O_RDONLY), (out, WRITE), (err, WRITE))):
        os.dup2(os.open(name, flags | os.O_CREAT), number)
    os.chdir(folder)
    sys.argv = [script, *options]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(*json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
