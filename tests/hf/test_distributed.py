"""The two lines of a user under `torchrun`: one process per party, the client last."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys, torch
from private_llm import PrivateConfig
from private_llm_hf import AutoPrivateModelForCausalLM

torch.set_num_threads(1)
config = PrivateConfig(protocol=sys.argv[2], party_mode="distributed", timeout_s=60, parallel_sessions=int(sys.argv[3]))
model = AutoPrivateModelForCausalLM.from_pretrained(sys.argv[1], config)
tokens = model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
print("tokens", tokens[0].tolist(), flush=True)
model.close()
"""


@pytest.mark.parametrize(("protocol", "ranks", "sessions"), [("trio", 3, 2), ("dealer", 4, 1), ("quad", 5, 1)])
@pytest.mark.full
def test_generate_under_torchrun(tmp_path: Path, protocol: str, ranks: int, sessions: int) -> None:
    """Trio: client beside party 0; the others: client apart. Only the client prints: the plaintext tokens."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, word_embed_proj_dim=32, pad_token_id=1, bos_token_id=2, eos_token_id=63,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "model")
    wanted = model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script),
        str(tmp_path / "model"), protocol, str(sessions),
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == f"tokens {wanted[0].tolist()}"
    assert done.stdout.count("tokens [") == 1
