"""What `fuzz.py` does to share files: headers of safetensors and their metadata, changed, with digests made anew."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from fuzz_mutators import changed, edited, edits, encoded
from fuzz_wire import fit_to_print
from private_llm_hf.checkpoint.model_spec import describe
from private_llm_hf.checkpoint.offload import OpenedFile
from private_llm_hf.checkpoint.share_files import ShareFile, ShareWriter, _digest, share_path
from private_llm_hf.checkpoint.weights import WeightList
from transformers import OPTConfig, OPTForCausalLM

from private_llm.config import PrivateConfig
from private_llm.errors import PrivateLLMError

_SIZES = {"hidden_size": 8, "ffn_dim": 8, "num_attention_heads": 1, "word_embed_proj_dim": 8, "vocab_size": 8}
_INNER = ("description", "agreement", "shapes", "keys")
"""Metadata that is JSON itself."""


class Shares:
    """A share file of a small model, opened and read."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-shares-")
        self._config, folder = PrivateConfig(), Path(self._folder.name)
        model = OPTForCausalLM(OPTConfig(num_hidden_layers=1, max_position_embeddings=8, **_SIZES))
        described = describe(OPTForCausalLM, model.config)
        wanted = WeightList.of(model)
        with ShareWriter(folder, self._config, described, wanted) as writer:
            for name, value in model.state_dict().items():
                if name in wanted.shapes:
                    writer(name, value.detach())
        self._whole = share_path(folder, 1).read_bytes()
        size = int.from_bytes(self._whole[:8], "little")
        self._header, self._data = json.loads(self._whole[8 : 8 + size]), self._whole[8 + size :]
        self._path = folder / "fuzzed.safetensors"

    def make(self, random: Random) -> dict[str, Any]:
        """Bytes changed anywhere, or a header changed as JSON, mostly with a digest that fits."""
        if random.random() < 0.3:
            return {"edits": edits(random, 4)}
        header = json.loads(json.dumps(self._header))
        metadata, name = header["__metadata__"], random.choice(_INNER)
        if random.random() < 0.6:
            inner = encoded(random, changed(random, json.loads(metadata[name])))
            metadata[name] = inner.decode("utf-8", "replace")
        elif random.random() < 0.5:
            header["__metadata__"] = changed(random, metadata)
        else:
            header = changed(random, header)
        return {"header": header, "sign": random.random() < 0.9}

    def run(self, case: dict[str, Any]) -> None:
        """It opens and its weights can be read, or the error is one of the library's own."""
        if "edits" in case:
            self._path.write_bytes(edited(self._whole, case["edits"]))
        else:
            self._write(case["header"])
            if case["sign"]:
                self._sign(case["header"])
        try:
            found = ShareFile.open(self._path, self._config, 1)
            for name in found.shapes:
                found.weight(name).map(torch.sum)
        except PrivateLLMError as error:
            fit_to_print(error)

    def _write(self, header: object) -> None:
        raw = json.dumps(header).encode("utf-8", "replace")
        self._path.write_bytes(len(raw).to_bytes(8, "little") + raw + self._data)

    def _sign(self, header: Any) -> None:
        """Give the file the digest that belongs to what is in it now, if it can have one."""
        try:
            metadata = header["__metadata__"]
            metadata["digest"] = _digest(metadata, OpenedFile(self._path).digests())
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError, MemoryError):
            return
        self._write(header)

    def __del__(self) -> None:
        shutil.rmtree(self._folder.name, ignore_errors=True)
