#!/usr/bin/env bash
# From nothing to a private generate(): environment, then the bundled model. Arguments go to `private-llm demo`.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
prepare_environment ""
case " $* " in
  *" --model smollm2 "* | *" --model=smollm2 "*) prepare_smollm2 ;;
esac

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/private-llm demo "$@"
