"""The model owner's side: calibrate a model, split its weights into one file for each party, and look at them.

    python examples/share_to_files.py [FOLDER]

Each file is as secret as its party: give party N nothing but `partyN.safetensors`. The folder `client` (configuration
and tokenizer, no weights) is for the users. The same by command: `private-llm calibrate`, then `private-llm share`.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import resources
from pathlib import Path

from private_llm_hf import PrivateConfig, ranges_of_checkpoint, share_checkpoint

MODEL = str(resources.files("private_llm_hf") / "demo_model")
TEXT = "My fellow citizens, the state of the union depends upon the work of the people. " * 8


def main(folder: Path) -> None:
    """Calibrate on a text like those that users will send, share, and say what each file holds."""
    ranges = ranges_of_checkpoint(MODEL, text=TEXT)
    print(f"calibrated {len(ranges.modules)} modules")

    for path in share_checkpoint(MODEL, folder, PrivateConfig(), ranges=ranges):
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB, mode {path.stat().st_mode & 0o777:o}")
    print("client:", *sorted(path.name for path in (folder / "client").iterdir()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
