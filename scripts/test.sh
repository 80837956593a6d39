#!/usr/bin/env bash
# From nothing to a tested checkout: environment, lint, types, layering, all tests, and without arguments (they go to
# pytest) the bars of speed and a smoke set with the newest versions of all dependencies.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
prepare_environment test
prepare_smollm2

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Counted before OMP_NUM_THREADS is set, because nproc would answer with that.
workers="$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)"
[ "$workers" -gt 4 ] && workers=4
# Every test process runs three parties as threads already; more threads only get in each other's way.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Hundreds of short-lived parties are threads of one test process: their freed memory stays in few heaps.
export MALLOC_ARENA_MAX=4
bin=.venv/bin

"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
"$bin/python" -m pytest -q tests/test_layering.py tests/test_lean_import.py
# Files keep their order (tests/conftest.py): sorted by their number of tests, the longest would come last, alone.
"$bin/python" -m pytest -q -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
if [ $# -eq 0 ]; then
  "$bin/python" scripts/studies/check_bars.py
  bash scripts/newest.sh
fi
